"""The verbs of the kvstore: the block table plus the bytes it speaks of.

The table decides in one step, without waiting; only checksums of many bytes leave the event loop, and what the table
thinks of the lease is asked again afterwards. Invariant 11: nothing becomes visible unless the bytes in the arena have
the checksum that its writer claims.
"""

import asyncio
from collections.abc import Mapping, Sequence

import xxhash

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import (
    Acquired,
    BlockPlace,
    Changes,
    Committed,
    Erased,
    Holder,
    Missed,
    NewBlocks,
    Refused,
    Reserved,
    TableStatistics,
    WrittenBlock,
)
from services.kvstore.operations.disk_tier import DiskCounts, DiskTier
from services.kvstore.ports import BlockArena, DiskFault

WAIT_MS_MAX = 10_000  # beyond this any prefill is faster
INLINE_BYTES_MAX = 16 * 1024 * 1024  # about 2 ms of xxh3 (8 GB/s here); more goes to a thread


class BlockService:
    """One arena and its table. Times are the clock's monotonic milliseconds."""

    def __init__(self, table: BlockTable, arena: BlockArena, clock: Clock, disk: DiskTier | None = None) -> None:
        """Owns none of them: whoever made the arena closes it."""
        self._table = table
        self._disk = disk
        self._arena = arena
        self._clock = clock

    def acquire(self, salt: bytes, keys: Sequence[bytes], holder: Holder) -> Acquired | Missed:
        """Lease the longest stored run of `keys` to a reader."""
        outcome = self._table.acquire(salt, keys, holder, self._now())
        if self._disk is not None and isinstance(outcome, Acquired):
            self._disk.note_used([block.key for block in outcome.blocks])
        return outcome

    async def acquire_waiting(
        self, salt: bytes, keys: Sequence[bytes], holder: Holder, wait_ms: int
    ) -> Acquired | Missed:
        """As `acquire`, after waiting up to `wait_ms` for what slower tiers have. Cancelled, nothing is leased."""
        if self._disk is not None and wait_ms > 0:
            await self._disk.promote(salt, keys, min(wait_ms, WAIT_MS_MAX))
        return self.acquire(salt, keys, holder)

    async def release(self, lease_id: str, suspected: Sequence[bytes] = ()) -> None:
        """End a lease. Blocks of it that its reader found to be wrong are looked at again first. Idempotent."""
        places = self._table.places(lease_id) if suspected else {}
        wrong = [places[key] for key in suspected if key in places]
        found = await self._checksums(wrong)
        for place in wrong:
            if self._table.places(lease_id).get(place.key) == place:  # still held, so nobody else writes there
                self._table.recheck(place.key, found[place.key])
        self._table.release(lease_id, self._now())

    def reserve(self, new: NewBlocks, holder: Holder) -> Reserved | Refused:
        """Give a writer slots for new blocks."""
        return self._table.reserve(new, holder, self._now())

    async def commit(self, lease_id: str, claims: Mapping[bytes, int]) -> Committed:
        """Publish the blocks whose bytes have the claimed checksum; the reservation ends."""
        places, parent = self._table.places(lease_id), self._table.parent_of_lease(lease_id)
        found = await self._checksums([places[key] for key in claims if key in places])
        written = [WrittenBlock(key, claims[key], checksum) for key, checksum in found.items()]
        outcome = self._table.commit(lease_id, written, self._now())
        if self._disk is not None and outcome.committed:
            self._disk.note_stored([key for key in places if key in claims], parent)
        return Committed(outcome.committed, len(claims) - outcome.committed)

    async def erase_salt(self, salt: bytes) -> Erased:
        """Drop every block of a tenant's salt in every tier and overwrite the bytes. Idempotent.

        Counts a block once for each tier it was in. Raises Unavailable if the disk refuses: ask again.
        """
        places = self._table.places_of(salt)
        erased = self._table.erase_salt(salt, self._now())
        for place in places:  # a reader who still copies finds a wrong checksum, which is a miss
            with self._arena.view(place.offset, place.length) as view:
                view[:] = bytes(place.length)
        on_disk = 0
        if self._disk is not None:
            try:
                on_disk = await self._disk.erase(salt)
            except DiskFault as fault:
                raise Unavailable("blocks on disk could not be erased") from fault
        return Erased(erased.blocks + on_disk, erased.bytes_dropped, sum(self.usage(salt)[::2]))

    def usage(self, salt: bytes) -> tuple[int, int, int, int]:
        """Of one salt: blocks and bytes in memory, blocks and bytes on disk."""
        return (*self._table.usage(salt), *(self._disk.usage(salt) if self._disk is not None else (0, 0)))

    def disk_counts(self) -> DiskCounts:
        """Counts of the disk; all 0 without one."""
        return self._disk.counts() if self._disk is not None else DiskCounts()

    def statistics(self) -> TableStatistics:
        """Counts, after ending what is due."""
        self._table.expire(self._now())
        return self._table.statistics()

    async def expire_leases(self) -> None:
        """End what is due, also when nobody calls (invariant 12)."""
        self._table.expire(self._now())

    def take_changes(self) -> Changes:
        """What became visible and what went since the last call."""
        return self._table.take_changes()

    def _now(self) -> int:
        return self._clock.monotonic_ms()

    async def _checksums(self, places: Sequence[BlockPlace]) -> dict[bytes, int]:
        if sum(place.length for place in places) <= INLINE_BYTES_MAX:
            return self._hash(places)
        return await asyncio.to_thread(self._hash, places)

    def _hash(self, places: Sequence[BlockPlace]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for place in places:
            with self._arena.view(place.offset, place.length) as view:
                found[place.key] = xxhash.xxh3_64_intdigest(view)
        return found

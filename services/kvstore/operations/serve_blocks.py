"""The verbs of the kvstore: the block table plus the bytes it speaks of.

The table decides in one step, without waiting; only checksums of many bytes leave the event loop, and what the table
thinks of the lease is asked again afterwards. Invariant 11: nothing becomes visible unless the bytes in the arena have
the checksum that its writer claims.
"""

import asyncio
from collections.abc import Mapping, Sequence

import xxhash

from roundhouse.clock import Clock
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
from services.kvstore.ports import BlockArena

INLINE_BYTES_MAX = 16 * 1024 * 1024  # about 2 ms of xxh3 (8 GB/s here); more goes to a thread


class BlockService:
    """One arena and its table. Times are the clock's monotonic milliseconds."""

    def __init__(self, table: BlockTable, arena: BlockArena, clock: Clock) -> None:
        """Owns neither: whoever made the arena closes it."""
        self._table = table
        self._arena = arena
        self._clock = clock

    def acquire(self, salt: bytes, keys: Sequence[bytes], holder: Holder) -> Acquired | Missed:
        """Lease the longest stored run of `keys` to a reader."""
        return self._table.acquire(salt, keys, holder, self._now())

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
        places = self._table.places(lease_id)
        found = await self._checksums([places[key] for key in claims if key in places])
        written = [WrittenBlock(key, claims[key], checksum) for key, checksum in found.items()]
        outcome = self._table.commit(lease_id, written, self._now())
        return Committed(outcome.committed, len(claims) - outcome.committed)

    def erase_salt(self, salt: bytes) -> Erased:
        """Drop every block of a tenant's salt. Idempotent."""
        return self._table.erase_salt(salt, self._now())

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

"""The verbs of the kvstore: the block table plus the bytes it speaks of.

The table decides in one step, without waiting. Invariant 11: what becomes visible carries the checksum of what
its writer meant to write, and whoever copies it out of the arena compares; so bytes are hashed once when they are
written and once when they are read. Only rechecks of what a reader found to be wrong hash here. Decision:
docs/decisions/0057-one-checksum.md.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import takewhile

import xxhash

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import (
    NOTHING_SHARED,
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
    Shared,
    TableStatistics,
    WrittenBlock,
)
from services.kvstore.operations.disk_parts import DiskCounts
from services.kvstore.operations.disk_tier import DiskTier
from services.kvstore.operations.fetch_blocks import PeerCounts, PeerTier, Wanted
from services.kvstore.ports import BlockArena, DiskFault

WAIT_MS_MAX = 10_000  # beyond this any prefill is faster
ROOM_STEP_BLOCKS = 64  # about a millisecond
OVERWRITE_BLOCKS = 16  # in one step: 16 MiB of large blocks in 3 ms
WRITERS_MS_MAX = 6_000  # an engine's lease to write takes 5 s at most
WRITERS_LOOK_MS = 20
INLINE_BYTES_MAX = 16 * 1024 * 1024  # about 2 ms of xxh3 (8 GB/s here); more goes to a thread


class BlockService:
    """One arena and its table. Times are the clock's monotonic milliseconds."""

    def __init__(
        self,
        table: BlockTable,
        arena: BlockArena,
        clock: Clock,
        disk: DiskTier | None = None,
        peers: PeerTier | None = None,
    ) -> None:
        """Owns none of them: whoever made the arena closes it."""
        self._table = table
        self._disk = disk
        self._peers = peers
        self._news = asyncio.Event()
        self._arena = arena
        self._clock = clock

    def acquire(
        self, salt: bytes, keys: Sequence[bytes], holder: Holder, shared: Shared = NOTHING_SHARED, hold: str = ""
    ) -> Acquired | Missed:
        """Lease the longest stored run of `keys` to a reader. What came here for its `hold` has no second use by it."""
        outcome = self._table.acquire(salt, keys, holder, self._now(), shared)
        if self._disk is not None and isinstance(outcome, Acquired):
            found = [block.key for block in outcome.blocks]
            self._disk.note_used(found if not hold else list(takewhile(self._table.was_used, found)))
        return outcome

    async def acquire_waiting(self, wanted: Wanted, holder: Holder, wait_ms: int) -> Acquired | Missed:
        """As `acquire`, after waiting up to `wait_ms` for what slower tiers have. Cancelled, nothing is leased."""
        wait_ms = min(wait_ms, WAIT_MS_MAX)
        if wait_ms > 0:
            until_ms = self._now() + wait_ms
            await self.promote(wanted.salt, wanted.keys, wait_ms, wanted.shared)
            if self._peers is not None:
                await self._peers.fetch(wanted, max(1, until_ms - self._now()))
        return self.acquire(wanted.salt, wanted.keys, holder, wanted.shared, wanted.hold)

    async def bring(self, wanted: Wanted, wait_ms: int) -> int:
        """Have a chain that peers are computing come here as it is computed; how many blocks of it are here then."""
        if self._peers is None:
            return self._table.run_length(wanted.salt, wanted.keys, wanted.shared)
        return await self._peers.bring(wanted, wait_ms)

    async def promote(self, salt: bytes, keys: Sequence[bytes], wait_ms: int, shared: Shared) -> None:
        """Wait up to `wait_ms` for what lies on this node's disk."""
        if self._disk is not None:
            await self._disk.promote(salt, keys, wait_ms, shared)

    def more(self, wanted: Wanted, have: int) -> int:
        """How many blocks after the first `have` lie in slower tiers here, or probably at peers."""
        on_disk = 0
        if self._disk is not None:
            on_disk = self._disk.run_length(wanted.salt, wanted.keys, have, wanted.shared)
        at_peers = self._peers.run_length(wanted, have + on_disk) if self._peers is not None else 0
        return on_disk + at_peers

    @property
    def news(self) -> asyncio.Event:
        """Set once when something becomes visible after this was asked for."""
        return self._news

    async def release(self, lease_id: str, suspected: Sequence[bytes] = ()) -> None:
        """End a lease. Blocks of it that its reader found to be wrong are looked at again first. Idempotent."""
        places = self._table.places(lease_id) if suspected else {}
        wrong = [places[key] for key in dict.fromkeys(suspected) if key in places]
        found = await self._checksums(wrong)
        for place in wrong:
            if self._table.places(lease_id).get(place.key) == place:  # still held, so nobody else writes there
                self._table.recheck(place.key, found[place.key])
        self._table.release(lease_id, self._now())

    def reserve(self, new: NewBlocks, holder: Holder) -> Reserved | Refused:
        """Give a writer slots for new blocks."""
        return self._table.reserve(new, holder, self._now())

    async def commit(self, lease_id: str, claims: Mapping[bytes, int]) -> Committed:
        """Publish the blocks of a lease with their writer's checksums; the reservation ends.

        The bytes are not read: every reader checks its own copy, and reports what is wrong."""
        keys = [key for key in self._table.writing(lease_id) if key in claims]
        written = [WrittenBlock(key, claims[key], claims[key]) for key in keys]
        return self._publish(lease_id, written, len(claims))

    async def commit_all(self, lease_id: str, checksums: Sequence[int]) -> Committed:
        """As `commit`, of all blocks of a lease, in the order of the reservation; of none if there are not as many."""
        keys = self._table.writing(lease_id)
        if len(keys) != len(checksums):
            keys = []
        written = [WrittenBlock(key, sum_, sum_) for key, sum_ in zip(keys, checksums, strict=bool(keys))]
        return self._publish(lease_id, written, len(checksums))

    def _publish(self, lease_id: str, written: Sequence[WrittenBlock], claimed: int) -> Committed:
        parent = self._table.parent_of_lease(lease_id)
        outcome = self._table.commit(lease_id, written, self._now())
        if outcome.committed:
            if self._disk is not None:
                self._disk.note_stored([block.key for block in written], parent)
            news, self._news = self._news, asyncio.Event()
            news.set()
        return Committed(outcome.committed, claimed - outcome.committed)

    async def erase_salt(self, salt: bytes) -> Erased:
        """Drop every block of a tenant's salt in every tier and overwrite the bytes. Idempotent.

        Counts a block once for each tier it was in. Waits a while for those that are being written; what is still to be
        overwritten then counts as left. Raises Unavailable if the disk refuses: ask again. Goes on if cancelled."""
        if self._peers is not None:
            self._peers.erased(salt)
        erased = self._table.erase_salt(salt, self._now())
        on_disk = 0
        try:
            on_disk = await self._disk.erase(salt) if self._disk is not None else 0
        except DiskFault as fault:
            raise Unavailable("blocks on disk could not be erased") from fault
        finally:
            await self._overwrite()
        until_ms = self._now() + WRITERS_MS_MAX
        while not self._table.is_overwritten(salt) and self._now() < until_ms:
            await self._clock.sleep_ms(WRITERS_LOOK_MS)
            await self._overwrite()
        return Erased(erased.blocks + on_disk, erased.bytes_dropped, sum(self.usage(salt)[::2]))

    async def _overwrite(self) -> None:
        """Overwrite what has been erased, in steps, so that nobody waits for it."""
        while places := self._table.to_overwrite(OVERWRITE_BLOCKS, self._now()):
            for place in places:
                with self._arena.view(place.offset, place.length) as view:
                    view[:] = bytes(place.length)
            self._table.overwritten(places)
            await asyncio.sleep(0)

    def salts(self) -> tuple[bytes, ...]:
        """Every salt that has blocks in any tier."""
        on_disk = self._disk.salts() if self._disk is not None else ()
        return tuple(dict.fromkeys((*self._table.salts(), *on_disk)))

    def usage(self, salt: bytes) -> tuple[int, int, int, int]:
        """Of one salt: blocks and bytes in memory, blocks and bytes on disk."""
        return (*self._table.usage(salt), *(self._disk.usage(salt) if self._disk is not None else (0, 0)))

    def disk_counts(self) -> DiskCounts:
        """Counts of the disk; all 0 without one."""
        return self._disk.counts() if self._disk is not None else DiskCounts()

    def peer_counts(self) -> PeerCounts:
        """Counts of the exchange with other nodes; all 0 without it."""
        return self._peers.counts() if self._peers is not None else PeerCounts()

    def stored_keys(self) -> list[bytes]:
        """Every block that can be found here, in any tier. O(blocks)."""
        in_memory = self._table.stored_keys()
        return list(dict.fromkeys([*in_memory, *self._disk.keys()])) if self._disk is not None else in_memory

    def statistics(self) -> TableStatistics:
        """Counts, after ending what is due."""
        self._table.expire(self._now())
        return self._table.statistics()

    async def expire_leases(self) -> None:
        """End what is due, also when nobody calls (invariant 12), and overwrite what was erased while it was leased."""
        self._table.expire(self._now())
        await self._overwrite()

    async def keep_room(self) -> None:
        """Evict where there is less room than there should be, in steps, so that nobody waits for it."""
        for _ in iter(lambda: self._table.make_room(ROOM_STEP_BLOCKS, self._now()), 0):
            await asyncio.sleep(0)

    def take_changes(self) -> Changes:
        """What can be found here since the last call, and what no longer can, in any tier. A key may be in both."""
        changes = self._table.take_changes()
        if self._disk is None:
            return changes
        left = [key for key in changes.dropped if key not in self._disk]
        left += [key for key in self._disk.take_gone() if not self._table.has(key)]
        return Changes(changes.stored, tuple(left))

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

"""Blocks between the arena and the disk: written in the background when they have earned it, read back when asked for.

A block earns its place by a second use, or by continuing a chain that was used (a session that goes on). What is
written and never read costs the disk; what a scan touches once is never written. One writer at a time; readers beside
it. The bytes go between the slot and the disk directly, and are checked against the checksum of the block's first
writer after every read (invariant 11). Any fault is a miss: counted, the block dropped, and the disk left for a while.
Decision: docs/decisions/0054-disk-tier.md.
"""

import asyncio
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from typing import TypeVar

import structlog
import xxhash

from services.kvstore.domain.disk_index import DiskRecord, NothingToReclaim
from services.kvstore.domain.records import (
    NOTHING_SHARED,
    Held,
    HeldBlock,
    Holder,
    NewBlocks,
    Reserved,
    Shared,
    WrittenBlock,
)
from services.kvstore.domain.unerased import UnerasedRecords
from services.kvstore.operations.disk_parts import DiskCounts, DiskParts, Reading
from services.kvstore.ports import BlockCorrupt, DiskFault

log = structlog.get_logger(__name__)

PAGE = 4096
QUEUE_BLOCKS_MAX = 4_096  # guess: 4 GB of 1 MiB blocks, seconds of writing; more is refused and asked again when used
TURN_RUNS_MAX = 256  # of one background turn
RUN_BLOCKS_MAX = 64  # written under one lease
RUN_BYTES_MAX = 16 << 20  # of them: an erasure waits for what is being written, 10 to 20 ms at 1 GB/s
READ_LANES = 4  # threads that read at once: deep enough for the bandwidth of one NVMe drive at 1 MiB
CHUNK_BLOCKS = 32  # read together; the first ones are visible while the next are read
REST_MS = 1_000  # after a fault: a full or broken disk is asked once a second, not once a block
DISK_HOLDER = Holder("disk", 30_000)  # a write takes milliseconds; if it hangs, the slot comes back

Result = TypeVar("Result")


class DiskTier:
    """The disk of one node. All methods are called on the event loop."""

    def __init__(self, parts: DiskParts) -> None:
        """Call `open` before anything else."""
        self._parts = parts
        self._table, self._arena, self._blocks, self._index = parts.table, parts.arena, parts.blocks, parts.index
        self._queue: dict[bytes, None] = {}
        self._writing = asyncio.Lock()
        self._promotions: dict[bytes, asyncio.Task[None]] = {}
        self._erasing: dict[bytes, asyncio.Task[int]] = {}
        self._unerased = UnerasedRecords()
        self._resting_until_ms = 0
        self._counts = DiskCounts()

    async def open(self) -> None:
        """Find what earlier processes left. O(blocks on disk)."""
        found = await self._in_thread(lambda: list(self._blocks.scan()))
        orphans = self._index.restore(found)
        await self._destroy(orphans)
        log.info("disk_blocks_found", blocks=len(self._index), orphans=len(orphans))

    async def close(self) -> None:
        """Wait for what is being read, written or erased."""
        await asyncio.gather(*self._promotions.values(), *self._erasing.values(), return_exceptions=True)
        async with self._writing:
            self._queue.clear()

    def note_used(self, keys: Sequence[bytes]) -> None:
        """A chain, parents first, was found in memory: it has earned its place on disk."""
        self._index.use(keys)
        self._enqueue(keys)

    def note_stored(self, keys: Sequence[bytes], parent_key: bytes) -> None:
        """A chain below `parent_key` was stored: it is expected back if its parent has been."""
        if parent_key in self._index or parent_key in self._queue:
            self._enqueue(keys)

    def counts(self) -> DiskCounts:
        """Counts now."""
        return replace(
            self._counts,
            bytes_total=self._index.segments_max * self._parts.segment_bytes,
            bytes_held=self._blocks.bytes_held,
            blocks=len(self._index),
        )

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def keys(self) -> list[bytes]:
        """Everything on disk. O(blocks)."""
        return self._index.keys()

    def take_gone(self) -> list[bytes]:
        """What left the disk since the last call."""
        return self._index.take_gone()

    def run_length(self, salt: bytes, keys: Sequence[bytes], have: int, shared: Shared = NOTHING_SHARED) -> int:
        """How many of `keys` after the first `have` lie here, in a run."""
        return len(self._index.run(salt, keys, have, shared))

    def salts(self) -> tuple[bytes, ...]:
        """Every salt that has blocks on disk, or is not wholly erased yet."""
        return tuple(dict.fromkeys((*self._index.salts(), *self._unerased.salts(), *self._erasing)))

    def usage(self, salt: bytes) -> tuple[int, int]:
        """Blocks of a salt on disk, also those still to be overwritten, and the bytes they take there."""
        (blocks, size), (left, left_size) = self._index.usage(salt), self._unerased.usage(salt)
        return blocks + left, size + left_size

    # Memory to disk

    async def write_turn(self) -> None:
        """Write some of what waits. Idempotent when nothing does."""
        for _ in range(TURN_RUNS_MAX):
            if not self._queue or self._is_resting():
                return
            async with self._writing:
                await self._write_run()

    def _enqueue(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._index or key in self._queue:
                continue
            if len(self._queue) >= QUEUE_BLOCKS_MAX or self._is_resting():
                self._count(refused=1)
                return
            self._queue[key] = None

    async def _write_run(self) -> None:
        """Write a run of one chain from the head of the queue, under one lease: that costs as much as it is deep."""
        head = list(islice(self._queue, RUN_BLOCKS_MAX))
        held = self._table.hold(head, RUN_BYTES_MAX, DISK_HOLDER, self._now())
        run = held.blocks if isinstance(held, Held) else ()
        for key in head[: len(run) or 1]:
            self._queue.pop(key, None)
        try:
            for block in run:
                if self._table.lies_at(block.place):  # else it was erased or found to be wrong meanwhile
                    await self._write_held(block)
        except DiskFault as fault:
            self._failed(fault)
        finally:
            if isinstance(held, Held):
                self._table.release(held.lease_id, self._now())

    async def _write_held(self, held: HeldBlock) -> None:
        place = held.place
        span = PAGE + -(-place.length // PAGE) * PAGE
        record = DiskRecord(
            place.key, held.salt, held.model_digest, held.parent_key, place.length, place.checksum, span=span
        )
        if not self._blocks.fits(place.length) or not self._index.may_add(record):
            self._count(refused=1)
            return
        if self._blocks.needs_segment(place.length) and not await self._make_room():
            self._count(refused=1)
            return
        with self._slot(place.offset, place.length) as view:
            view[place.length :] = bytes(len(view) - place.length)  # no rests of other blocks on the disk
            placed = await self._in_thread(lambda: self._blocks.append(record, view))
        if self._table.lies_at(place) and self._index.add(placed):
            self._count(written=1)
        else:  # erased or found to be wrong meanwhile
            await self._destroy([placed])

    async def _make_room(self) -> bool:
        """Give up segments until one more may be begun."""
        while len(self._blocks.segments) >= self._index.segments_max:
            plan = self._index.reclaim(self._blocks.segments, self._blocks.writing)
            if isinstance(plan, NothingToReclaim):
                return False
            self._count(dropped=len(plan.dropped))
            await self._destroy([record for record in plan.dropped if record.segment != plan.segment])
            kept = [(record, await self._in_thread(partial(self._copy, record))) for record in plan.moved]
            self._owe([record for record in plan.dropped if record.segment == plan.segment])
            await self._in_thread(partial(self._blocks.remove, plan.segment))
            self._unerased.keep(self._blocks.segments)
            for record, copy in kept:
                await self._move(record, copy)
        return True

    def _copy(self, record: DiskRecord) -> memoryview | None:
        view = memoryview(mmap.mmap(-1, record.span - PAGE))
        try:
            self._blocks.read_into(record, view)
        except DiskFault:
            return None
        return view if _is_right(record, view) else None

    async def _move(self, record: DiskRecord, copy: memoryview | None) -> None:
        if record.key not in self._index:
            return
        try:
            if copy is None:
                raise DiskFault("a block to be moved was wrong")
            placed = await self._in_thread(lambda: self._blocks.append(record, copy))
        except DiskFault as fault:
            self._failed(fault)
            await self._destroy(self._index.drop(record.key))
        else:
            self._index.moved(record, placed)

    # Disk to memory

    async def promote(self, salt: bytes, keys: Sequence[bytes], wait_ms: int, shared: Shared = NOTHING_SHARED) -> None:
        """Bring the run of `keys` that lies on disk into memory, waiting at most `wait_ms`.

        What comes later is there for the next caller. Two callers that want the same wait for the same reads.
        """
        have = self._table.run_length(salt, keys, shared)
        records = self._index.run(salt, keys, have, shared)
        if not records or salt in self._erasing or shared.salt in self._erasing:
            return
        task = self._promotions.get(records[0].key)
        if task is None:
            task = asyncio.create_task(self._promote(records, shared.salt), name="promote blocks")
            self._promotions[records[0].key] = task
            task.add_done_callback(partial(_ended, self._promotions, records[0].key))
        await asyncio.wait({task}, timeout=wait_ms / 1000)

    async def _promote(self, records: Sequence[DiskRecord], shared_salt: bytes) -> None:
        """Read in chunks, each begun before the one ahead of it has ended, so that no lane ever waits for another."""
        ahead: Reading | None = None
        for _, same in groupby(records, key=lambda record: record.salt):  # a shared prefix, and then the tenant's own
            of_salt = list(same)
            for first in range(0, len(of_salt), CHUNK_BLOCKS):
                reading = self._begin(of_salt[first : first + CHUNK_BLOCKS], shared_salt)
                if (ahead is not None and not await self._publish(ahead, reading)) or reading is None:
                    return
                ahead = reading
        if ahead is not None:
            await self._publish(ahead)

    def _begin(self, chunk: Sequence[DiskRecord], parent_salt: bytes) -> Reading | None:
        """Reserve slots and read into them; None if there are none. What is above may still be being read."""
        head, by_key = chunk[0], {record.key: record for record in chunk}
        if head.salt in self._erasing:
            return None
        new = NewBlocks(head.salt, head.model_digest, head.parent_key, tuple(by_key), head.length, parent_salt)
        reserved = self._table.reserve(new, DISK_HOLDER, self._now())
        if not isinstance(reserved, Reserved):
            return None
        places = [(by_key[place.key], place.offset) for place in reserved.slots]
        lanes = asyncio.gather(*(self._read_lane(places[lane::READ_LANES]) for lane in range(READ_LANES)))
        return Reading(reserved.lease_id, head.salt, [record for record, _ in places], len(chunk), lanes)

    async def _publish(self, reading: Reading, below: Reading | None = None) -> bool:
        """Make visible what was read well. Whether all of the chunk is in memory now; if not, what is being read
        `below` it is given up, before anything of it is overwritten on the disk with what it stands under."""
        lanes = await reading.lanes
        results = [lanes[number % READ_LANES][number // READ_LANES] for number in range(len(reading.records))]
        is_erased = reading.salt in self._erasing  # while it was read: whatever was read is nobody's
        written = [block for block in results if block is not None and not is_erased]
        outcome = self._table.commit(reading.lease_id, written, self._now())
        self._count(promoted=outcome.committed)
        whole = outcome.committed == reading.wanted
        if not whole:
            await self._give_up(below)
        for record, block in zip(reading.records, results, strict=True):
            if block is None or block.checksum_claimed != block.checksum_found:
                await self._drop(record)
        return whole

    async def _give_up(self, reading: Reading | None) -> None:
        """Wait until nobody writes into the slots any more; then they are free again."""
        if reading is not None:
            await reading.lanes
            self._table.release(reading.lease_id, self._now())

    async def _read_lane(self, places: Sequence[tuple[DiskRecord, int]]) -> list[WrittenBlock | None]:
        """Read blocks one after the other into their offsets; lanes run beside each other. None for one that failed."""

        def read() -> list[WrittenBlock | DiskFault]:
            return [self._read(record, offset) for record, offset in places]

        found: list[WrittenBlock | None] = []
        for outcome in await self._in_thread(read) if places else ():
            if isinstance(outcome, DiskFault):
                self._failed(outcome)
            else:
                self._count(corrupt=int(outcome.checksum_claimed != outcome.checksum_found))
            found.append(None if isinstance(outcome, DiskFault) else outcome)
        return found

    def _read(self, record: DiskRecord, offset: int) -> WrittenBlock | DiskFault:
        try:
            with self._slot(offset, record.length) as view:
                self._blocks.read_into(record, view)
                found = xxhash.xxh3_64_intdigest(view[: record.length])
        except BlockCorrupt:
            found = ~record.checksum  # not what was written, whatever it is
        except DiskFault as fault:
            return fault
        return WrittenBlock(record.key, record.checksum, found)

    async def _drop(self, record: DiskRecord) -> None:
        async with self._writing:
            if self._index.holds(record):  # else it was moved while it was read
                await self._destroy(self._index.drop(record.key))

    # Erasing

    async def erase(self, salt: bytes) -> int:
        """Overwrite every block of a salt; how many that were. Drop them from the table first. Raises DiskFault.

        On DiskFault bytes may be left in files that could be neither overwritten nor removed: they are counted, and the
        next call begins with them. Goes on if its caller is cancelled; who asks meanwhile waits for the same."""
        task = self._erasing.get(salt)
        if task is None:
            task = self._erasing[salt] = asyncio.create_task(self._erase(salt), name="erase a salt")
            task.add_done_callback(partial(_ended, self._erasing, salt))
        return await asyncio.shield(task)

    async def _erase(self, salt: bytes) -> int:
        async with self._writing:
            self._unerased.add(salt, self._index.erase(salt))
            gone = self._unerased.of(salt)
            try:
                await self._in_thread(lambda: self._blocks.forget(salt))
                await self._in_thread(lambda: self._blocks.destroy(gone))
                self._unerased.done(salt)
            finally:
                self._forget_removed()
        if self._promotions:  # none of them shows anything of the salt any more; but until they end they write it
            await asyncio.wait(set(self._promotions.values()))
        return len(gone)

    async def _destroy(self, records: Sequence[DiskRecord]) -> None:
        if not records:
            return
        try:
            await self._in_thread(lambda: self._blocks.destroy(tuple(records)))
        except DiskFault as fault:
            self._owe(records)
            self._failed(fault)
        self._forget_removed()

    def _owe(self, records: Sequence[DiskRecord]) -> None:
        """Blocks that were not overwritten though the index has forgotten them: an erasure has to find them."""
        for record in records:
            self._unerased.add(record.salt, [record])

    def _forget_removed(self) -> None:
        self._unerased.keep(self._blocks.segments)
        for number in self._index.segments - set(self._blocks.segments):
            self._index.drop_segment(number)

    # Both

    def _slot(self, offset: int, length: int) -> memoryview:
        """A slot up to the end of the page its block ends in, if that is the slot's too."""
        pages = -(-length // PAGE) * PAGE
        return self._arena.view(offset, pages if self._parts.slots_are_pages else length)

    def _failed(self, fault: DiskFault) -> None:
        self._count(errors=1)
        self._resting_until_ms = self._now() + REST_MS
        self._queue.clear()  # children must not come before parents; the next use asks for the whole chain again
        log.warning("disk_fault", text=str(fault))

    def _is_resting(self) -> bool:
        return self._now() < self._resting_until_ms

    def _now(self) -> int:
        return self._parts.clock.monotonic_ms()

    def _count(self, **more: int) -> None:
        counts = self._counts
        self._counts = replace(counts, **{name: getattr(counts, name) + count for name, count in more.items()})

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._parts.threads, work)


def _ended(running: dict[bytes, asyncio.Task[Result]], key: bytes, task: asyncio.Task[Result]) -> None:
    """A task of its own is over; who began it may have left, or waits for no more than its end."""
    del running[key]
    if not task.cancelled() and task.exception() is not None:
        log.error("disk_work_failed", work=task.get_name(), error=repr(task.exception()))


def _is_right(record: DiskRecord, view: memoryview) -> bool:
    return xxhash.xxh3_64_intdigest(view[: record.length]) == record.checksum

"""The host tier's memory: one file of shared memory, filled by direct reads, mapped by engines.

    PATH         HOST_BYTES, sparse: a page costs memory from its first use, and then is used again for ever
    PATH.index   which versions are whole and where: written after the last byte of one came, replaced at once

First touch of fresh memory is the slow part (0.7 GB/s against 2.5 to 3.7 for reads into pages that are there), so pages
are never given back, only written over; huge pages where the kernel has them. Both files outlive this process: engines
go on reading from the map, and the next loader takes over what the index names. What is mapped is never written over
by a process that does not know so: an index that does not fit makes a new file, and the old map stays with its engines.
Decision: docs/decisions/0042-host-tier.md.
"""

import asyncio
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock

import msgspec
import structlog

from roundhouse.errors import NotFound, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.direct_io import CHUNK_BYTES, open_for_reading, read_into
from services.loader.adapters.own_thread import in_own_thread
from services.loader.ports import Filling, HostVersion, Lane

log = structlog.get_logger(__name__)

PAGE_BYTES = 2 * 1024 * 1024  # a huge page of x86-64: what is smaller wastes the rest of one
READS_AT_ONCE = 8  # keeps an NVMe drive's queue filled with 8 MiB reads; measured: 4 give 0.9 of it, 16 no more
REPORT_BYTES = 32 * 1024 * 1024
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python 3.11 has no name for
POPULATE_STEP_BYTES = 64 * 1024 * 1024  # about 0.1 s each: so soon a stop is noticed
STOP_S = 5.0


class _Version(msgspec.Struct, frozen=True):
    digest: str
    ranges: dict[str, tuple[int, int]]


class _Index(msgspec.Struct, frozen=True):
    inode: int
    capacity: int
    versions: list[_Version]


_decode = msgspec.json.Decoder(_Index).decode


class SharedArena:
    """`WeightArena` in a file. `wanted` bytes, less what the file system does not have. Close it when done."""

    def __init__(self, path: Path, wanted: int) -> None:
        self.path = path
        self.page = PAGE_BYTES
        self.capacity = wanted - wanted % PAGE_BYTES
        self._index = path.with_name(path.name + ".index")
        self._descriptor: int | None = None
        self._memory: mmap.mmap | None = None
        self._stopped = Event()

    async def start(self) -> list[HostVersion]:
        """See `WeightArena.start`. Raises Unavailable: another process has it."""
        return await asyncio.to_thread(self._start)

    async def fill(self, files: Sequence[Filling], lane: Lane, on_bytes: Callable[[int], None]) -> None:
        """See `WeightArena.fill`."""
        loop = asyncio.get_running_loop()
        run = _Run(lane, lambda done: _tell(loop, on_bytes, done))
        work = in_own_thread(self._fill, files, run)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            run.stopped.set()
            await asyncio.wait({work})  # a range may be used again only when nothing writes to it any more
            raise

    async def record(self, versions: Sequence[HostVersion]) -> None:
        """See `WeightArena.record`."""
        if self._descriptor is not None:
            await asyncio.to_thread(self._record, list(versions))

    async def fault_in(self) -> None:
        """Touch every page now, in the background, so that no load has to wait for it. Ends early after `close`."""
        await in_own_thread(self._fault_in)

    def close(self) -> None:
        """Let go of it; the files stay for the engines and for the next process. Idempotent."""
        self._stopped.set()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._memory is not None:
            with suppress(BufferError):  # a read still hangs: the map ends with the process
                self._memory.close()
            self._memory = None

    def _start(self) -> list[HostVersion]:
        if self.capacity == 0:
            return []
        try:
            found = self._take_over()
            if found is None:
                self._make()
                found = []
            assert self._descriptor is not None
            self._memory = mmap.mmap(self._descriptor, self.capacity)
        except OSError as error:
            raise Unavailable(f"the host arena {self.path} cannot be used: {error.strerror}") from error
        with suppress(OSError):  # not on every file system
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        return found

    def _take_over(self) -> list[HostVersion] | None:
        """What an earlier process left, if the index is of this file and of this size; None if there is nothing."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        self._descriptor = descriptor
        _lock(descriptor, self.path)
        status = os.fstat(descriptor)
        try:
            index = _decode(self._index.read_bytes())
        except (OSError, msgspec.MsgspecError):
            index = None
        if index is not None and (index.inode, index.capacity) == (status.st_ino, self.capacity) == (
            status.st_ino,
            status.st_size,
        ):
            return [HostVersion(Digest(each.digest), each.ranges) for each in index.versions]
        log.info("host_arena_dropped", path=str(self.path))
        os.close(descriptor)
        self._descriptor = None
        self.unlink()
        return None

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if self.capacity > free:
            log.warning("host_arena_cut", wanted=self.capacity, free=free)
            self.capacity = free // 2 - (free // 2) % PAGE_BYTES  # others live on that file system too
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _lock(self._descriptor, self.path)
        os.ftruncate(self._descriptor, max(self.capacity, PAGE_BYTES))
        self.capacity = max(self.capacity, PAGE_BYTES)
        self._record([])

    def unlink(self) -> None:
        """Remove the names: what engines have mapped stays theirs until they let go. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._index.unlink(missing_ok=True)

    def _record(self, versions: list[HostVersion]) -> None:
        assert self._descriptor is not None
        index = _Index(
            os.fstat(self._descriptor).st_ino,
            self.capacity,
            [_Version(each.digest, dict(each.ranges)) for each in versions],
        )
        fresh = self._index.with_name(self._index.name + ".new")
        fresh.write_bytes(msgspec.json.encode(index))
        fresh.rename(self._index)

    def _fill(self, files: Sequence[Filling], run: "_Run") -> None:
        assert self._memory is not None, "it was started"
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="arena") as threads:
            descriptors: list[int] = []
            try:
                for file in files:
                    descriptors.append(_open(file))  # noqa: PERF401 - those that are open are closed if one fails
                list(threads.map(lambda part: self._read(part, run), _parts(files, descriptors)))
            finally:
                threads.shutdown(cancel_futures=True)
                for descriptor in descriptors:
                    os.close(descriptor)
        if run.failure is not None:
            raise run.failure

    def _read(self, part: tuple[Filling, int, int], run: "_Run") -> None:
        file, descriptor, begin = part
        size = min(CHUNK_BYTES, file.size - begin)
        if run.failure is not None or run.stopped.is_set():
            return
        try:
            run.lane.wait_in_thread(size)
            padded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            assert self._memory is not None, "it is there while threads run"
            first = file.offset + begin
            with memoryview(self._memory) as memory, memory[first : first + padded] as view:
                if read_into(descriptor, view, begin) < size:
                    raise NotFound(f"{file.path} was cut")
        except OSError as error:
            run.fail(Unavailable(f"{file.path} cannot be read: {error.strerror}"))
        except (NotFound, Unavailable) as error:
            run.fail(error)
        else:
            run.count(size)

    def _fault_in(self) -> None:
        for offset in range(0, self.capacity, POPULATE_STEP_BYTES):
            if self._stopped.is_set() or self._memory is None:
                return
            with suppress(OSError, ValueError):  # an older kernel: pages come with their first use
                self._memory.madvise(POPULATE_WRITE, offset, min(POPULATE_STEP_BYTES, self.capacity - offset))


class _Run:
    """One filling over its threads."""

    def __init__(self, lane: Lane, report: Callable[[int], None]) -> None:
        self.lane = lane
        self.stopped = Event()
        self.failure: Exception | None = None
        self._report = report
        self._lock = Lock()
        self._done = 0
        self._reported = 0

    def fail(self, error: Exception) -> None:
        """Keep the first cause."""
        with self._lock:
            self.failure = self.failure or error

    def count(self, size: int) -> None:
        """So many bytes more came."""
        with self._lock:
            self._done += size
            if self._done - self._reported >= REPORT_BYTES:
                self._reported = self._done
                self._report(self._done)


def _parts(files: Sequence[Filling], descriptors: Sequence[int]) -> Iterable[tuple[Filling, int, int]]:
    for file, descriptor in zip(files, descriptors, strict=True):
        for begin in range(0, file.size, CHUNK_BYTES):
            yield file, descriptor, begin


def _open(file: Filling) -> int:
    try:
        return open_for_reading(file.path, file.size)
    except OSError as error:
        raise NotFound(f"{file.path} cannot be read: {error.strerror}") from error


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Unavailable(f"another loader uses the host arena {path}") from error


def _tell(loop: asyncio.AbstractEventLoop, on_bytes: Callable[[int], None], done: int) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(on_bytes, done)

"""The arena as one file in memory: made, faulted and locked at start, removed at the end.

Every page is touched once, before the service is ready, because the first touch costs ten times a copy. What is free is
asked first: taking pages that are not there would end in the machine's out-of-memory killer or in a SIGBUS. The lock on
the file tells a living owner from a dead one's leftover; a leftover is unlinked, never reused, because its engines may
still write into it. Decision: docs/decisions/0053-arena-file.md.
"""

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from roundhouse.errors import Unavailable

log = structlog.get_logger(__name__)

MEMINFO = Path("/proc/meminfo")
MADV_POPULATE_WRITE = 23  # Linux 5.14, <linux/mman.h>; not named by Python 3.11


class ShmArena:
    """`BlockArena` over a mapped file. Use `shm_arena`."""

    def __init__(self, path: str, descriptor: int, nbytes: int) -> None:
        """Maps and touches `nbytes` of an empty file. Raises Unavailable if memory does not suffice."""
        self._path = path
        self._descriptor = descriptor
        self._nbytes = nbytes
        os.ftruncate(descriptor, nbytes)
        self._map = mmap.mmap(descriptor, nbytes)
        try:
            _touch(self._map, descriptor, nbytes)
        except OSError as error:
            self._map.close()
            raise Unavailable(f"{nbytes} bytes of memory for {path} are not there: {error.strerror}") from error

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def view(self, offset: int, length: int) -> memoryview:
        """See `BlockArena.view`."""
        if offset < 0 or length < 0 or offset + length > self._nbytes:
            raise ValueError(f"{offset}+{length} is not within an arena of {self._nbytes} bytes")
        return memoryview(self._map)[offset : offset + length]

    def close(self) -> None:
        """Remove the file if it is still ours, and let go of the memory."""
        with suppress(OSError):
            if os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino:
                os.unlink(self._path)
        with suppress(BufferError):  # somebody still reads: the memory goes with the process
            self._map.close()
        os.close(self._descriptor)


@contextmanager
def shm_arena(path: str, nbytes: int) -> Iterator[ShmArena]:
    """An arena of `nbytes` at `path` while the context is open. Blocks for about a second a GB.

    Raises Unavailable if a living process owns the file, or memory does not suffice."""
    if nbytes % mmap.PAGESIZE:
        raise Unavailable(f"an arena is whole pages of {mmap.PAGESIZE} bytes, not {nbytes}")
    if nbytes > (free := _bytes_free(path)):
        raise Unavailable(f"{nbytes} bytes for the arena {path} are not there: {free} are free")
    descriptor = _create(path)
    try:
        arena = ShmArena(path, descriptor, nbytes)
    except BaseException:
        os.unlink(path)
        os.close(descriptor)
        raise
    try:
        yield arena
    finally:
        arena.close()


def _bytes_free(path: str) -> int:
    """What the file system and the machine have left; a container's own limit is not seen here."""
    try:
        room = os.statvfs(Path(path).parent)
    except OSError as error:
        raise Unavailable(f"cannot make the arena {path}: {error.strerror}") from error
    available = next(
        (int(line.split()[1]) * 1024 for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")),
        sys.maxsize,
    )
    return min(room.f_bavail * room.f_frsize, available)


def _create(path: str) -> int:
    """A new, locked, empty file in place of a leftover."""
    try:
        _remove_leftover(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Unavailable(f"cannot make the arena {path}: {error.strerror}") from error
    return descriptor


def _remove_leftover(path: str) -> None:
    if not Path(path).exists():
        return
    leftover = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Unavailable(f"the arena {path} belongs to a running kvstore") from error
    else:
        log.warning("stale_arena_removed", path=path)
        os.unlink(path)
    finally:
        os.close(leftover)


def _touch(memory: mmap.mmap, descriptor: int, nbytes: int) -> None:
    """Take every page now, huge ones where the machine allows it."""
    with suppress(OSError):  # shmem_enabled = never
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if sys.platform == "linux" and error.errno == 22:  # EINVAL: an older kernel
            os.posix_fallocate(descriptor, 0, nbytes)  # ENOSPC here, instead of SIGBUS below
            for offset in range(0, nbytes, mmap.PAGESIZE):
                memory[offset] = 0
        else:
            raise

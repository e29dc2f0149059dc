"""The kvstore's arena as an engine sees it: mapped once, its blocks written and checked in place.

A writer's checksum is of the bytes that it copies, and so is a reader's, in the same pass where the machine can
(`engines.checked_copy`). A reader that copies by itself, into a layout of its own, does so first and checks the arena
afterwards: bytes that were wrong when they were copied are still wrong then, so a lease that ran out, a slot that was
given away or a bit that fell over is always seen (invariant 11). Not thread-safe for one slot; different slots may be
used at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import NDArray

from engines.checked_copy import checked_copies
from roundhouse.wire.v1 import kv_pb2

MAP_AHEAD_BYTES_MAX = 1 << 30  # 0.2 s of the caller's time, before the first block; the rest follows beside it
MAP_STEP_BYTES = 16 << 20  # 3 ms, after which whoever else changes this process's memory map gets its turn
MADV_POPULATE_WRITE = 23  # Linux 5.14, <linux/mman.h>; not named by Python 3.11

Bytes = NDArray[np.uint8]


class MappedArena:
    """The arena of one incarnation of the store. Goes with its last reader."""

    def __init__(self, description: kv_pb2.Arena) -> None:
        """Maps the file. Raises OSError, and ValueError if it is not the store's."""
        self.incarnation = description.incarnation
        descriptor = os.open(description.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != description.bytes:
                raise ValueError("the arena's file has another size than the store says")
            mapped = mmap.mmap(descriptor, description.bytes)
        finally:
            os.close(descriptor)
        with suppress(OSError):  # huge pages where the arena has them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(mapped, np.uint8)
        first = min(len(mapped), MAP_AHEAD_BYTES_MAX)
        _enter_pages(self._bytes[:first])
        self._rest = threading.Thread(target=_enter_pages, args=(self._bytes[first:],), name="arena-pages", daemon=True)
        self._rest.start()

    def wait_until_entered(self, timeout_s: float) -> bool:
        """Wait until no block can meet a page fault; False when the time ran out first. Nobody has to."""
        self._rest.join(timeout_s)
        return not self._rest.is_alive()

    def view(self, offset: int, length: int) -> Bytes:
        """The bytes of a slot themselves. Raises ValueError outside of the arena."""
        if offset < 0 or offset + length > len(self._bytes):
            raise ValueError("a slot outside of the arena")
        return self._bytes[offset : offset + length]

    def write(self, offsets: Sequence[int], blocks: Sequence[Bytes]) -> list[int]:
        """Copy blocks of one length into slots; the checksums of what should be there now. Raises ValueError outside of
        the arena, before anything is written."""
        return checked_copies(self._bytes, offsets, blocks)

    def is_right(self, offset: int, length: int, checksum: int) -> bool:
        """Whether a slot holds what its writer meant to write."""
        return self.right([offset], length, [checksum]) == 1

    def right(self, offsets: Sequence[int], length: int, checksums: Sequence[int]) -> int:
        """How many leading slots hold what their writer meant to write. Raises ValueError outside of the arena."""
        memory, digest = self._bytes.data, xxhash.xxh3_64_intdigest
        for number, (offset, checksum) in enumerate(zip(offsets, checksums, strict=True)):
            if not 0 <= offset <= len(memory) - length:
                raise ValueError("a slot outside of the arena")
            if digest(memory[offset : offset + length]) != checksum:
                return number
        return len(offsets)

    def read(self, offsets: Sequence[int], into: Sequence[Bytes], checksums: Sequence[int]) -> int:
        """Copy slots out; how many leading ones hold what their writer meant to write. The others have any bytes in
        `into`. Raises ValueError outside of the arena."""
        found = checked_copies(self._bytes, offsets, into, outward=True)
        pairs = enumerate(zip(found, checksums, strict=True))
        return next((number for number, (is_, was) in pairs if is_ != was), len(found))


def _enter_pages(memory: Bytes) -> None:
    """Enter the arena's pages into this process's tables now. Other threads run meanwhile.

    Later each would be a fault in the middle of a copy. Measured, in pages of 4 KiB: 0.2 s a GB, and first writes at
    1.9 GB/s instead of 15."""
    madvise = ctypes.CDLL(None).madvise  # mmap.madvise would hold the interpreter
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = memory.ctypes.data
    for done in range(0, len(memory), MAP_STEP_BYTES):
        if madvise(start + done, min(MAP_STEP_BYTES, len(memory) - done), MADV_POPULATE_WRITE) != 0:
            return  # before Linux 5.14: they fault when they are used

"""Reads and writes past the page cache, where the file system lets one and the file is large enough to gain by it.

Weights are read once a load: through the page cache they cost a copy of every byte (0.3 s of processor time a GB) and
push out what others use. Direct transfers need page-aligned memory and block-aligned offsets, so buffers here are
anonymous maps. Falls back to ordinary I/O where a file system refuses (tmpfs, some network ones).
"""

import errno
import mmap
import os
from pathlib import Path

CHUNK_BYTES = 8 * 1024 * 1024  # one transfer; measured: 4 to 16 MiB are alike, smaller ones are slower
BLOCK_BYTES = 4096  # what every disk in use takes as a unit
# Smaller ones are read at once, and often again by the next model of the same family. Measured: from 16 MiB on direct
# reads take a quarter of the processor time.
DIRECT_FROM_BYTES = 4 * 1024 * 1024


def open_for_reading(path: Path, size: int) -> int:
    """A descriptor, direct if that pays. Raises OSError."""
    if size >= DIRECT_FROM_BYTES:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def open_for_writing(path: Path, size: int) -> int:
    """A descriptor for reading and writing, made if it is not there; direct if that pays. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if size >= DIRECT_FROM_BYTES:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600)


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view`, which is of whole blocks and begins at one; fewer bytes only at the end. Raises OSError."""
    done = 0
    while done < len(view):
        with view[done:] as rest:
            count = os.preadv(descriptor, [rest], offset + done)
        done += count
        if count == 0 or count % BLOCK_BYTES:
            break
    return done


def write_all(descriptor: int, view: memoryview, size: int, offset: int) -> None:
    """Write `size` bytes of `view`; up to a block more is written, so cut the file afterwards. Raises OSError."""
    padded = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    done = 0
    while done < padded:
        with view[done:padded] as rest:
            done += os.pwritev(descriptor, [rest], offset + done)
        done -= done % BLOCK_BYTES if done < padded else 0  # a disk that is about to be full writes less


def aligned_buffer(size: int = CHUNK_BYTES) -> mmap.mmap:
    """Memory for direct transfers, in huge pages where there are some."""
    buffer = mmap.mmap(-1, size)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer

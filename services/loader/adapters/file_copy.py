"""Fetches one file of a version: reads, hashes and writes overlap, and a killed process loses little.

    source ─read─► buffer ─► SHA-256 ─► buffer ─write─► PATH.part      PATH.journal: bytes that are safely there

SHA-256 of one file runs on one core (1.1 GB/s), so while one chunk is hashed the next is read and the one before is
written; several files of a version run beside each other. The next process goes on where the journal ends: it hashes
what is there again, so nothing but the hash of the whole file decides (invariant 10).
"""

import fcntl
import mmap
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from roundhouse.errors import InvalidInput
from services.loader.adapters.direct_io import (
    CHUNK_BYTES,
    aligned_buffer,
    open_for_writing,
    read_into,
    write_all,
)
from services.loader.ports import SourceReader

JOURNAL_BYTES = (
    256 * 1024 * 1024
)  # how much a killed loader fetches again at most; each entry costs a flush of the disk
BUFFERS = 3  # one is read, one hashed, one written

Gate = Callable[[int], None]
"""Called before a chunk of so many bytes moves; blocks while it may not, raises when it shall not."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole file under a name that is not its final one."""

    path: Path
    size: int
    sha256: str

    def discard(self) -> None:
        """Delete it. Idempotent."""
        self.path.unlink(missing_ok=True)


def fetch(reader: SourceReader, size: int, sha256_hex: str, folder: Path, gate: Gate) -> Fetched:
    """Fetch a file of `size` bytes. Blocking; ends within a chunk once `gate` raises, and then leaves nothing.

    `sha256_hex` may be empty: then it is found out, and an interrupted copy cannot be gone on with.
    Raises InvalidInput (other content, another size), what `reader` and `gate` raise, OSError (the disk)."""
    with ExitStack() as stack:
        part = _Part(folder, sha256_hex, size)
        stack.callback(part.close)
        try:
            found = _run(reader, part, size, gate)
            if sha256_hex and found != sha256_hex and part.resumed_at:
                part.restart()
                found = _run(reader, part, size, gate)
            if sha256_hex and found != sha256_hex:
                raise InvalidInput(f"a file of the source has other content: sha256:{found}, not sha256:{sha256_hex}")
            part.finish()
        except BaseException:
            part.discard()
            raise
        return Fetched(part.path, size, found)


class _Part:
    """The half-written file and its journal."""

    def __init__(self, folder: Path, key: str, size: int) -> None:
        self._size = size
        self.path = folder / f"{key or uuid.uuid4().hex}.part"
        self._journal = self.path.with_suffix(".journal") if key else None
        self.descriptor = open_for_writing(self.path, size)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a copy that was given up still hangs in its source: leave it alone
            os.close(self.descriptor)
            self.path, self._journal = folder / f"{uuid.uuid4().hex}.part", None
            self.descriptor = open_for_writing(self.path, size)
        self.resumed_at = self._safe_bytes()
        self._unsaved = 0

    def write(self, buffer: mmap.mmap, size: int, offset: int) -> None:
        """Write one chunk; now and then remember how far everything is safe."""
        with memoryview(buffer) as view:
            write_all(self.descriptor, view, size, offset)
        self._unsaved += size
        if self._journal is not None and self._unsaved >= JOURNAL_BYTES and size == CHUNK_BYTES:
            os.fdatasync(self.descriptor)
            _write_synced(self._journal, str(offset + size))
            self._unsaved = 0

    def restart(self) -> None:
        """What was resumed was not what it seemed: begin at the first byte."""
        self.resumed_at = 0
        os.ftruncate(self.descriptor, 0)

    def finish(self) -> None:
        """Cut what was written beyond the end, and make it safe."""
        os.ftruncate(self.descriptor, self._size)
        os.fsync(self.descriptor)
        self._drop_journal()

    def discard(self) -> None:
        """Leave nothing."""
        self._drop_journal()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def _drop_journal(self) -> None:
        if self._journal is not None:
            self._journal.unlink(missing_ok=True)

    def _safe_bytes(self) -> int:
        """Whole chunks that an earlier process left."""
        if self._journal is None:
            return 0
        with suppress(OSError, ValueError):
            said = int(self._journal.read_text())
            there = min(said, os.fstat(self.descriptor).st_size, self._size)
            return there - there % CHUNK_BYTES
        return 0


def _run(reader: SourceReader, part: _Part, size: int, gate: Gate) -> str:
    """Hash what is there, fetch the rest; the SHA-256 of the whole."""
    if size <= CHUNK_BYTES:
        return _run_small(reader, part, size, gate)
    content = sha256()
    buffers = [aligned_buffer() for _ in range(BUFFERS)]

    def read(buffer: mmap.mmap, offset: int) -> int:
        gate(min(CHUNK_BYTES, size - offset))
        with memoryview(buffer) as view:
            if offset < part.resumed_at:
                return read_into(part.descriptor, view, offset)
            return reader.read_into(view, offset)

    with ThreadPoolExecutor(2, thread_name_prefix="chunk") as threads:
        offsets = range(0, size, CHUNK_BYTES)
        reading = threads.submit(read, buffers[0], 0)
        writing: Future[None] | None = None
        for number, offset in enumerate(offsets):
            buffer = buffers[number % BUFFERS]
            count = reading.result()
            _expect(count, min(CHUNK_BYTES, size - offset))
            if number + 1 < len(offsets):
                reading = threads.submit(read, buffers[(number + 1) % BUFFERS], offset + CHUNK_BYTES)
            with memoryview(buffer) as view, view[:count] as chunk:
                content.update(chunk)
            if writing is not None:
                writing.result()
            writing = threads.submit(part.write, buffer, count, offset) if offset >= part.resumed_at else None
        if writing is not None:
            writing.result()
    return content.hexdigest()


def _run_small(reader: SourceReader, part: _Part, size: int, gate: Gate) -> str:
    gate(size)
    buffer = aligned_buffer(max(4096, -(-size // 4096) * 4096))
    with memoryview(buffer) as view:
        count = reader.read_into(view, 0) if size else 0
        _expect(count, size)
        with view[:count] as chunk:
            digest = sha256(chunk).hexdigest()
    if count:
        part.write(buffer, count, 0)
    return digest


def _expect(count: int, wanted: int) -> None:
    if count < wanted:
        raise InvalidInput("the source has fewer bytes than it was listed with")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

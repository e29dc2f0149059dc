"""Copies the files of a version several at a time and hashes them on the way.

One thread hashes at about 1 GB/s on a core, less than a fast disk reads, and waits while it reads and writes; so a few
files are in flight together, each through a buffer that is used again. Both the hash and the kernel's calls release the
interpreter's lock. It gives nothing a final name and leaves cleaning up to its caller.
Invariant: a manifest is returned only if every file was written whole and the digest is the one asked for.
"""

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import FileIO
from pathlib import Path

import msgspec

from roundhouse.catalogue.digests import FileEntry, digest_of_entries, version_files
from roundhouse.errors import InvalidInput, NotFound, RoundhouseError, Unavailable
from roundhouse.vocabulary import Digest

CHUNK_BYTES = 4 * 1024 * 1024  # two huge pages; large enough that Python's share of the time is small. A guess.
FILES_AT_ONCE = 4  # a guess: keeps two to four cores hashing while others wait for the disk
REPORT_BYTES = 32 * 1024 * 1024  # how often a caller hears of progress; about 30 times a second on a fast disk


class ManifestFile(msgspec.Struct, frozen=True):
    """One verified file, as it was when it was verified."""

    name: str
    size: int
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True):
    """What a version consists of."""

    digest: str
    is_single_file: bool
    files: list[ManifestFile]


class ParallelCopy:
    """One pass over a source, for one call of `run`. `report` is called in any thread, with rising byte counts."""

    def __init__(self, source: Path, size_max: int, report: Callable[[int], None], stopped: threading.Event) -> None:
        self._source = source
        self._size_max = size_max
        self._report = report
        self._stopped = stopped
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._done = 0
        self._reported = 0
        self._buffers: list[mmap.mmap] = []

    def run(self, target: Path, digest: Digest) -> Manifest:
        """Copy to `target`. Blocks; ends within a chunk a file once `stopped` is set.

        Raises NotFound, InvalidInput (not the digest's content, or more than `size_max`), Unavailable (stopped),
        OSError (the target's disk). The first cause wins, and no thread is left behind."""
        files = version_files(self._source)
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="stage") as threads:
            tried = list(threads.map(lambda pair: self._try(pair[0], pair[1], target / pair[0]), files))
        if self._failure is not None:
            raise self._failure
        entries = [entry for entry in tried if entry is not None]
        found = digest_of_entries(entries)
        if found != digest:
            raise InvalidInput(f"the source has other content than the catalogue: {found}, not {digest}")
        verified = [ManifestFile(each.name, each.size, (target / each.name).stat().st_mtime_ns) for each in entries]
        return Manifest(digest, self._source.is_file(), verified)

    def _try(self, name: str, source: Path, target: Path) -> FileEntry | None:
        """The copied file; None once any file failed."""
        if self._failure is not None:
            return None
        try:
            return self._file(name, source, target)
        except (RoundhouseError, OSError) as error:
            with self._lock:
                self._failure = self._failure or error
            return None

    def _file(self, name: str, source: Path, target: Path) -> FileEntry:
        content, size = sha256(), 0
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            reader = FileIO(source)
        except OSError as error:
            raise NotFound(f"{source} cannot be read: {error.strerror}") from error
        buffer = self._buffer()
        with reader, FileIO(target, "w") as writer, memoryview(buffer) as view:
            while count := _read(reader, view, source):
                with view[:count] as chunk:
                    self._count(count)
                    content.update(chunk)
                    _write(writer, chunk)
                size += count
            os.fsync(writer.fileno())
        self._buffers.append(buffer)
        return FileEntry(name, size, content.digest())

    def _buffer(self) -> mmap.mmap:
        try:
            return self._buffers.pop()
        except IndexError:
            buffer = mmap.mmap(-1, CHUNK_BYTES)
            buffer.madvise(mmap.MADV_HUGEPAGE)
            return buffer

    def _count(self, size: int) -> None:
        if self._stopped.is_set() or self._failure is not None:
            raise Unavailable("the loader is stopping")
        with self._lock:
            self._done += size
            if self._done > self._size_max:
                raise InvalidInput("the source grew while it was copied")
            if self._done - self._reported >= REPORT_BYTES:
                self._reported = self._done
                self._report(self._done)


def _read(reader: FileIO, view: memoryview, source: Path) -> int:
    try:
        return reader.readinto(view) or 0
    except OSError as error:
        raise NotFound(f"{source} cannot be read: {error.strerror}") from error


def _write(writer: FileIO, chunk: memoryview) -> None:
    """Write all of it: one call may write less, as on a disk that is about to be full."""
    written = 0
    while written < len(chunk):
        written += writer.write(chunk[written:]) or 0

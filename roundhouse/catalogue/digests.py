"""The digest of a model version: one SHA-256 over the names, sizes and contents of its files.

Whoever loads a version computes it again from the bytes it has (invariant 10). It does not cover time stamps, owners
or modes, so a copy has the digest of its original. Every field is length-prefixed: no two different folders have the
same input to the hash. Decision: docs/decisions/0081-version-digest.md.
"""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from roundhouse.errors import Conflict, InvalidInput, NotFound
from roundhouse.vocabulary import Digest

CHUNK_BYTES = 1024 * 1024  # large enough that Python's share of the time is small
CACHE_ENTRIES_MAX = 65_536  # files; about 20 MB of keys
_TAG = b"roundhouse/version/v1"
# A file changed within this time may change again within the same tick of its time stamp, so it is not remembered
# ("racy git", Documentation/technical/racy-git.txt of Git). Two seconds is the coarsest tick of a file system (FAT).
_RACY_NS = 2_000_000_000

Progress = Callable[[int], None]
"""Called with the bytes read since the last call, from the thread that reads."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version."""

    name: str  # relative to the version's folder, with `/`; the file's own name if the version is one file
    size: int  # bytes
    sha256: bytes  # 32 bytes


_Identity = tuple[str, int, int, int, int, int]


class DigestCache:
    """Remembers the hashes of files that have not changed since. Thread-safe; lives as long as the process."""

    def __init__(self, entries_max: int = CACHE_ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._hashes: dict[_Identity, bytes] = {}
        self._lock = threading.Lock()

    def get(self, identity: _Identity) -> bytes | None:
        """The remembered hash of exactly this file content, or None."""
        with self._lock:
            return self._hashes.get(identity)

    def put(self, identity: _Identity, content_hash: bytes) -> None:
        """Remember; the oldest entry goes when the cache is full."""
        with self._lock:
            if len(self._hashes) >= self._entries_max:
                del self._hashes[next(iter(self._hashes))]
            self._hashes[identity] = content_hash


def version_digest(path: Path, *, cache: DigestCache | None = None, progress: Progress | None = None) -> Digest:
    """The digest of a version's folder or single file. Blocking: call it from a thread. Complexity: all its bytes.

    Raises NotFound (no such path), InvalidInput (empty folder, or something in it that is no file), Conflict (a file
    changed while it was read)."""
    return digest_of_entries(version_entries(path, cache=cache, progress=progress))


def version_entries(
    path: Path, *, cache: DigestCache | None = None, progress: Progress | None = None
) -> list[FileEntry]:
    """The files of a version with their hashes, by name. As `version_digest` otherwise."""
    return [_entry(name, file, cache, progress) for name, file in version_files(path)]


def digest_of_entries(entries: Iterable[FileEntry]) -> Digest:
    """The digest over entries whose contents were hashed elsewhere, for example while they were copied. Any order."""
    total = sha256(_field(_TAG))
    for entry in sorted(entries, key=lambda entry: entry.name):
        total.update(_field(entry.name.encode("utf-8", "surrogateescape")))
        total.update(entry.size.to_bytes(8, "big"))
        total.update(entry.sha256)
    return Digest(f"sha256:{total.hexdigest()}")


def version_files(path: Path) -> list[tuple[str, Path]]:
    """(relative name, file) of everything a version consists of, sorted by name. Links to files count as files.

    Raises NotFound, InvalidInput."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise NotFound(f"there is no {path}")
    files = sorted((file.relative_to(path).as_posix(), file) for file in _walk(path))
    if not files:
        raise InvalidInput(f"{path} has no files")
    return files


def _walk(folder: Path) -> Iterable[Path]:
    for where, folders, names in os.walk(folder):
        for name in folders:
            if (Path(where) / name).is_symlink():
                raise InvalidInput(f"{Path(where) / name} is a link to a folder")
        for name in names:
            yield Path(where) / name


def _entry(name: str, file: Path, cache: DigestCache | None, progress: Progress | None) -> FileEntry:
    before = _stat(file)
    identity = _identity(file, before)
    known = cache.get(identity) if cache is not None else None
    if known is not None:
        if progress is not None:
            progress(before.st_size)
        return FileEntry(name, before.st_size, known)
    content_hash = _hash_file(file, progress)
    if _identity(file, _stat(file)) != identity:
        raise Conflict(f"{file} changed while it was read")
    if cache is not None and time.time_ns() - before.st_mtime_ns > _RACY_NS:
        cache.put(identity, content_hash)
    return FileEntry(name, before.st_size, content_hash)


def _stat(file: Path) -> os.stat_result:
    try:
        result = file.stat()
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(result.st_mode):
        raise InvalidInput(f"{file} is not a regular file")
    return result


def _identity(file: Path, result: os.stat_result) -> _Identity:
    # The change time tells a file that was rewritten and given its old modification time back (`cp -p`).
    return str(file), result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino, result.st_dev


def _hash_file(file: Path, progress: Progress | None) -> bytes:
    content = sha256()
    try:
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                content.update(chunk)
                if progress is not None:
                    progress(len(chunk))
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error
    return content.digest()


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "big") + value

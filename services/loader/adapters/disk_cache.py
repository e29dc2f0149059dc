"""The disk cache: verified weights by digest, in a folder that Triton reads too.

    CACHE_DIR/incoming/<hex>.<random>/…      being copied and hashed; thrown away at start
    CACHE_DIR/weights/<hex>/manifest.json    names, sizes and time stamps of what was verified
    CACHE_DIR/weights/<hex>/content/…        the files
    CACHE_DIR/outgoing/<random>/…            being deleted; thrown away at start

A version is copied and hashed in one pass, synced, and only then renamed to its final name (invariant 10). Links to the
source would be quicker but would change with it, so there are none. Blocking work runs in threads.
Decision: docs/decisions/0041-disk-cache.md.
"""

import asyncio
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from roundhouse.catalogue.digests import version_files
from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.parallel_copy import Manifest, ParallelCopy
from services.loader.ports import CachedVersion

log = structlog.get_logger(__name__)

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Manifest).decode


class DiskCache:
    """`WeightCache` in a folder that this process has for itself."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._weights = folder / "weights"
        self._outgoing = folder / "outgoing"
        self._clock = clock
        self._lock_fd: int | None = None

    async def start(self) -> list[CachedVersion]:
        """See `WeightCache.start`."""
        return await asyncio.to_thread(self._start)

    async def measure(self, source_path: str) -> int:
        """See `WeightCache.measure`."""
        return await asyncio.to_thread(_measure, Path(source_path))

    async def find(self, digest: Digest) -> CachedVersion | None:
        """See `WeightCache.find`."""
        return await asyncio.to_thread(self._find, digest)

    async def stage(
        self, source_path: str, digest: Digest, *, size_max: int, on_bytes: Callable[[int], None]
    ) -> CachedVersion:
        """See `WeightCache.stage`."""
        loop = asyncio.get_running_loop()
        stopped = threading.Event()

        def report(done: int) -> None:
            loop.call_soon_threadsafe(on_bytes, done)

        copy = ParallelCopy(Path(source_path), size_max, report, stopped)
        try:
            return await asyncio.to_thread(self._stage, copy, digest)
        except asyncio.CancelledError:
            stopped.set()  # the thread cleans up after its current chunk
            raise

    async def remove(self, digest: Digest) -> None:
        """See `WeightCache.remove`."""
        await asyncio.to_thread(self._remove, digest)

    def close(self) -> None:
        """Let another process have the folder. Idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _start(self) -> list[CachedVersion]:
        try:
            for folder in (self._incoming, self._weights, self._outgoing):
                folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise Unavailable(f"the cache folder {self._folder} cannot be used: {error.strerror}") from error
        for leftover in [*self._incoming.iterdir(), *self._outgoing.iterdir()]:
            log.info("cache_leftover_removed", name=leftover.name)
            shutil.rmtree(leftover, ignore_errors=True)
        return [cached for path in sorted(self._weights.iterdir()) if (cached := self._check(path)) is not None]

    def _take_lock(self) -> None:
        self._lock_fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise Unavailable(f"another loader uses the cache folder {self._folder}") from error

    def _find(self, digest: Digest) -> CachedVersion | None:
        path = self._weights / _hex(digest)
        cached = self._check(path) if path.exists() else None
        if cached is not None:
            os.utime(path / "manifest.json", ns=(self._clock.now_ms() * 1_000_000,) * 2)
        return cached

    def _check(self, path: Path) -> CachedVersion | None:
        """The version if its files are those that were verified; else it is deleted."""
        try:
            manifest = _decode((path / "manifest.json").read_bytes())
            used_ms = (path / "manifest.json").stat().st_mtime_ns // 1_000_000
            for file in manifest.files:
                status = (path / "content" / file.name).stat()
                if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                    raise InvalidInput(f"{file.name} was changed")
        except (OSError, msgspec.MsgspecError, InvalidInput) as error:
            log.warning("cached_weights_dropped", name=path.name, reason=str(error))
            self._discard(path)
            return None
        size = sum(file.size for file in manifest.files)
        return CachedVersion(Digest(manifest.digest), _content(path, manifest), size, used_ms)

    def _stage(self, copy: ParallelCopy, digest: Digest) -> CachedVersion:
        hexadecimal = _hex(digest)
        temporary = self._incoming / f"{hexadecimal}.{uuid.uuid4().hex[:8]}"
        try:
            (temporary / "content").mkdir(parents=True)
            manifest = copy.run(temporary / "content", digest)
            _write_synced(temporary / "manifest.json", _encode(manifest))
            _sync_folders(temporary)
            temporary.rename(self._weights / hexadecimal)
            _sync_folder(self._weights)
        except OSError as error:
            raise Unavailable(f"the weights cannot be copied to the cache: {error.strerror}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        size = sum(file.size for file in manifest.files)
        return CachedVersion(digest, _content(self._weights / hexadecimal, manifest), size, self._clock.now_ms())

    def _remove(self, digest: Digest) -> None:
        self._discard(self._weights / _hex(digest))

    def _discard(self, path: Path) -> None:
        """Delete so that a half-deleted version never has its final name."""
        gone = self._outgoing / uuid.uuid4().hex
        try:
            path.rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)


def _measure(source: Path) -> int:
    return sum(_size(file) for _, file in version_files(source))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error


def _content(path: Path, manifest: Manifest) -> Path:
    content = path / "content"
    return content / manifest.files[0].name if manifest.is_single_file else content


def _hex(digest: Digest) -> str:
    """The digest as a folder name. Raises InvalidInput: it is no digest, and so no safe name."""
    algorithm, _, hexadecimal = digest.partition(":")
    if algorithm != "sha256" or len(hexadecimal) != 64 or set(hexadecimal) - set("0123456789abcdef"):
        raise InvalidInput("a digest is sha256: and 64 hexadecimal digits")
    return hexadecimal


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

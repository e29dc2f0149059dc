"""The disk cache: files by content, and versions that are made of them, in a folder that Triton reads too.

    CACHE_DIR/files/<hh>/<sha256>              one verified file; versions share it
    CACHE_DIR/weights/<hex>/content/…          hard links to those files, under the version's own names
    CACHE_DIR/weights/<hex>/manifest.json      names, sizes, hashes and time stamps of what was verified
    CACHE_DIR/incoming/<sha256>.part .journal  being fetched; the next process goes on with it (`file_copy`)
    CACHE_DIR/outgoing/<random>/…              being deleted; thrown away at start

A file is hashed while it is copied, synced, and only then gets its final name; a version likewise, once the digest over
its files is the one asked for (invariant 10). Links to the source would be quicker but would change with it, so there
are none. Blocking work runs in threads. Decisions: docs/decisions/0041-disk-cache.md, 0044-files-by-content.md.
"""

import asyncio
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import structlog

from roundhouse.catalogue.digests import FileEntry, digest_of_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, RoundhouseError, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.cache_manifest import Manifest, ManifestFile, hex_of, read_manifest, write_synced
from services.loader.adapters.file_copy import fetch
from services.loader.adapters.folder_source import FolderSource
from services.loader.adapters.own_thread import in_own_thread
from services.loader.ports import CachedVersion, FoundOnDisk, Interrupted, Lane, StageRequest, WeightSource

log = structlog.get_logger(__name__)

FILES_AT_ONCE = 4  # a guess: keeps two to four cores hashing while others wait for the disk
REPORT_BYTES = 8 * 1024 * 1024  # how often a caller hears of progress: about each chunk
STOP_S = 5.0  # how long a cancelled copy may take to stop: a chunk; one that hangs in its source is left alone


class DiskCache:
    """`WeightCache` in a folder that this process has for itself."""

    def __init__(self, folder: Path, clock: Clock, objects: WeightSource | None = None) -> None:
        self._folder = folder
        self._files = folder / "files"
        self._incoming = folder / "incoming"
        self._weights = folder / "weights"
        self._outgoing = folder / "outgoing"
        self._clock = clock
        self._folders: WeightSource = FolderSource()
        self._objects = objects
        self._lock_fd: int | None = None
        self._hanging: set[tuple[Digest, str]] = set()
        """Copies that were given up and have not stopped, by version and source: each keeps its threads."""

    async def start(self) -> FoundOnDisk:
        """See `WeightCache.start`."""
        return await asyncio.to_thread(self._start)

    async def look(self, request: StageRequest) -> tuple[ContentFile, ...]:
        """See `WeightCache.look`."""
        if _digest_of(request.files) == request.digest:
            return request.files
        return tuple(await in_own_thread(self._source(request.source).files, request.source))

    async def find(self, digest: Digest) -> CachedVersion | None:
        """See `WeightCache.find`."""
        return await asyncio.to_thread(self._find, digest)

    async def stage(self, request: StageRequest, lane: Lane, on_bytes: Callable[[int], None]) -> CachedVersion:
        """See `WeightCache.stage`."""
        files = await self.look(request)
        if sum(file.size for file in files) > request.size_max:
            raise InvalidInput("the version is larger than what was reserved for it")
        copy = (request.digest, request.source)
        if copy in self._hanging:
            raise Unavailable("an earlier copy of these weights still hangs in their source")
        counter = _Counter(lane, asyncio.get_running_loop(), on_bytes)
        work = in_own_thread(self._stage, request, files, counter)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            counter.stop()
            await asyncio.wait({work}, timeout=STOP_S)
            if not work.done():
                self._hanging.add(copy)
                work.add_done_callback(lambda _: self._hanging.discard(copy))
            work.add_done_callback(_seen)
            raise

    async def remove(self, digest: Digest) -> None:
        """See `WeightCache.remove`."""
        await asyncio.to_thread(self._discard, self._weights / hex_of(digest))

    async def drop(self, keys: Collection[str]) -> None:
        """See `WeightCache.drop`."""
        await asyncio.to_thread(self._drop, list(keys))

    def close(self) -> None:
        """Let another process have the folder. Idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _source(self, source: str) -> WeightSource:
        if "://" not in source:
            return self._folders
        if self._objects is None:
            raise InvalidInput(f"no source takes the address {source}")
        return self._objects

    def _start(self) -> FoundOnDisk:
        try:
            for folder in (self._files, self._incoming, self._weights, self._outgoing):
                folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise Unavailable(f"the cache folder {self._folder} cannot be used: {error.strerror}") from error
        for leftover in self._outgoing.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)
        versions = [cached for path in sorted(self._weights.iterdir()) if (cached := self._check(path)) is not None]
        known = {file.sha256 for version in versions for file in version.files}
        for path in self._files.glob("*/*"):
            if path.name not in known:
                log.info("cache_leftover_removed", name=path.name)
                path.unlink(missing_ok=True)
        return FoundOnDisk(versions, list(self._interrupted()))

    def _interrupted(self) -> Iterator[Interrupted]:
        """What the journal says is of use; everything else in `incoming` goes."""
        parts = {path for path in self._incoming.glob("*.part") if path.with_suffix(".journal").exists()}
        for path in sorted(self._incoming.iterdir()):
            if path in parts:
                status = path.stat()
                yield Interrupted(path.stem, status.st_size, status.st_mtime_ns // 1_000_000)
            elif path.with_suffix(".part") not in parts:
                log.info("cache_leftover_removed", name=path.name)
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def _take_lock(self) -> None:
        self._lock_fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise Unavailable(f"another loader uses the cache folder {self._folder}") from error

    def _find(self, digest: Digest) -> CachedVersion | None:
        path = self._weights / hex_of(digest)
        cached = self._check(path) if path.exists() else None
        if cached is not None:
            os.utime(path / "manifest.json", ns=(self._clock.now_ms() * 1_000_000,) * 2)
        return cached

    def _check(self, path: Path) -> CachedVersion | None:
        """The version if its files are those that were verified; else it is deleted, and so is the file at fault."""
        try:
            manifest, used_ms = read_manifest(path)
            for file in manifest.files:
                status = (path / "content" / file.name).stat()
                if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                    self._drop([file.sha256])
                    raise InvalidInput(f"{file.name} was changed")
        except (OSError, msgspec.MsgspecError, InvalidInput) as error:
            log.warning("cached_weights_dropped", name=path.name, reason=str(error))
            self._discard(path)
            return None
        size = sum(file.size for file in manifest.files)
        files = tuple(ContentFile(name=file.name, size=file.size, sha256=file.sha256) for file in manifest.files)
        return CachedVersion(Digest(manifest.digest), _content(path, manifest), size, used_ms, files)

    def _stage(self, request: StageRequest, files: tuple[ContentFile, ...], counter: "_Counter") -> CachedVersion:
        try:
            entries = self._fetch_all(request, files, counter)
            found = digest_of_entries(entries)
            if found != request.digest:
                if not request.files:
                    self._drop([entry.sha256.hex() for entry in entries])
                raise InvalidInput(f"the source has other content than the catalogue: {found}, not {request.digest}")
            manifest = self._publish(request.digest, entries, _is_single(request.source))
        except OSError as error:
            raise Unavailable(f"the weights cannot be copied to the cache: {error.strerror}") from error
        path = self._weights / hex_of(request.digest)
        size = sum(entry.size for entry in entries)
        kept = tuple(ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in entries)
        return CachedVersion(request.digest, _content(path, manifest), size, self._clock.now_ms(), kept)

    def _fetch_all(self, request: StageRequest, files: tuple[ContentFile, ...], counter: "_Counter") -> list[FileEntry]:
        """Every file under its content's name. The first failure stops the others and is the one told."""
        source = self._source(request.source)
        made: list[str] = []

        def fetch_one(file: ContentFile) -> FileEntry | None:
            try:
                key = self._ensure(source, request, file, counter)
                made.append(key)
                return FileEntry(file.name, file.size, bytes.fromhex(key))
            except (RoundhouseError, OSError) as error:
                counter.fail(error)
                return None

        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="stage") as threads:
            entries = list(threads.map(fetch_one, sorted(files, key=lambda file: -file.size)))
        if counter.failure is not None:
            if not request.files:
                self._drop(made)  # nobody else knows their names
            raise counter.failure
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.name)

    def _ensure(self, source: WeightSource, request: StageRequest, file: ContentFile, counter: "_Counter") -> str:
        """Have one file's content here; its SHA-256."""
        target = self._file(file.sha256) if file.sha256 else None
        if target is not None and target.exists() and target.stat().st_size == file.size:
            counter.count(file.size)
            return file.sha256
        with closing(source.open(request.source, file)) as reader:
            fetched = fetch(reader, file.size, file.sha256, self._incoming, counter.gate)
        target = self._file(fetched.sha256)
        if target.exists():
            fetched.discard()
            return fetched.sha256
        target.parent.mkdir(exist_ok=True)
        fetched.path.rename(target)
        _sync_folder(target.parent)
        return fetched.sha256

    def _publish(self, digest: Digest, entries: list[FileEntry], single: bool) -> Manifest:
        """Link the files under the version's names, and give the whole its final name."""
        temporary = self._incoming / f"{uuid.uuid4().hex}.version"
        try:
            for entry in entries:
                link = temporary / "content" / _inside(entry.name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.hardlink_to(self._file(entry.sha256.hex()))
            manifest = Manifest(digest, single, [_manifest_file(temporary, entry) for entry in entries])
            write_synced(temporary / "manifest.json", msgspec.json.encode(manifest))
            _sync_folders(temporary)
            with suppress(FileExistsError):
                temporary.rename(self._weights / hex_of(digest))
            _sync_folder(self._weights)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return manifest

    def _file(self, key: str) -> Path:
        return self._files / key[:2] / hex_of(Digest(f"sha256:{key}"))

    def _drop(self, keys: Collection[str]) -> None:
        for key in keys:
            with suppress(InvalidInput):  # a content that never got its name
                self._file(key).unlink(missing_ok=True)
                for suffix in ("part", "journal"):
                    (self._incoming / f"{key}.{suffix}").unlink(missing_ok=True)

    def _discard(self, path: Path) -> None:
        """Delete so that a half-deleted version never has its final name."""
        gone = self._outgoing / uuid.uuid4().hex
        try:
            path.rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)


class _Counter:
    """Counts the bytes of one staging over its threads, and stops them all when one fails or nobody waits."""

    def __init__(self, lane: Lane, loop: asyncio.AbstractEventLoop, on_bytes: Callable[[int], None]) -> None:
        self.failure: Exception | None = None
        self._lane = lane
        self._loop = loop
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._done = 0
        self._reported = 0

    def gate(self, size: int) -> None:
        """See `file_copy.Gate`."""
        if self.failure is not None:
            raise Unavailable("another file of the version failed")
        self._lane.wait_in_thread(size)
        self.count(size)

    def count(self, size: int) -> None:
        """So many bytes more are there, or about to be."""
        with self._lock:
            self._done += size
            if self._done - self._reported >= REPORT_BYTES:
                self._reported = self._done
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._on_bytes, self._done)

    def fail(self, error: Exception) -> None:
        """Keep the first cause."""
        with self._lock:
            self.failure = self.failure or error

    def stop(self) -> None:
        """The caller gave up."""
        self.fail(Unavailable("nobody waits for these weights any more"))


def _seen(work: "asyncio.Future[CachedVersion]") -> None:
    """What became of a copy that nobody waits for is nobody's any more."""
    if not work.cancelled():
        work.exception()


def _digest_of(files: tuple[ContentFile, ...]) -> Digest | None:
    """The digest over a list of files; None if the list is no such list."""
    try:
        return digest_of_entries(FileEntry(file.name, file.size, bytes.fromhex(file.sha256)) for file in files)
    except (ValueError, OverflowError):
        return None


def _is_single(source: str) -> bool:
    return "://" not in source and Path(source).is_file()


def _inside(name: str) -> str:
    """A name that stays below its folder: a source may list anything."""
    if name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
        raise InvalidInput(f"{name!r} is no name of a file in a folder")
    return name


def _content(path: Path, manifest: Manifest) -> Path:
    content = path / "content"
    return content / manifest.files[0].name if manifest.is_single_file else content


def _manifest_file(temporary: Path, entry: FileEntry) -> ManifestFile:
    status = (temporary / "content" / entry.name).stat()
    return ManifestFile(entry.name, entry.size, status.st_mtime_ns, entry.sha256.hex())


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

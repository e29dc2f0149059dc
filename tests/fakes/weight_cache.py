"""The loader's disk cache in memory. Passes tests/contract/test_weight_cache.py as the real one does.

`sources` says what lies where: path → files with their contents' hashes. `stage_ms` is how long a copy takes while its
lane is open; `silent` sources send nothing.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.catalogue.digests import FileEntry, digest_of_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import Digest
from services.loader.ports import CachedVersion, FoundOnDisk, Interrupted, Lane, StageRequest

STEP_MS = 10


@dataclass(slots=True)
class FakeSource:
    """What lies at one path."""

    digest: Digest
    files: tuple[ContentFile, ...]


def digest_of(files: tuple[ContentFile, ...]) -> Digest:
    """The version digest over these files."""
    return digest_of_entries(FileEntry(file.name, file.size, bytes.fromhex(file.sha256)) for file in files)


@dataclass(slots=True)
class FakeWeightCache:
    """`WeightCache` in dictionaries."""

    clock: Clock
    sources: dict[str, FakeSource] = field(default_factory=dict)
    stage_ms: int = 0
    stop_ms: int = 0
    """How long a copy that is given up takes to stop."""
    silent: set[str] = field(default_factory=set)
    cached: dict[Digest, CachedVersion] = field(default_factory=dict)
    contents: set[str] = field(default_factory=set)
    """Keys of the files that are whole."""
    interrupted: list[Interrupted] = field(default_factory=list)
    copies: list[Digest] = field(default_factory=list)
    """Every copy that was begun."""
    fetched: list[str] = field(default_factory=list)
    """Every file that was fetched, by content."""

    async def start(self) -> FoundOnDisk:
        """See `WeightCache.start`."""
        return FoundOnDisk(list(self.cached.values()), self.interrupted)

    async def look(self, request: StageRequest) -> tuple[ContentFile, ...]:
        """See `WeightCache.look`."""
        if request.files and digest_of(request.files) == request.digest:
            return request.files
        files = self._source(request.source).files
        return tuple(ContentFile(name=file.name, size=file.size, sha256="") for file in files)

    async def find(self, digest: Digest) -> CachedVersion | None:
        """See `WeightCache.find`."""
        return self.cached.get(digest)

    async def stage(self, request: StageRequest, lane: Lane, on_bytes: Callable[[int], None]) -> CachedVersion:
        """See `WeightCache.stage`."""
        source = self._source(request.source)
        self.copies.append(request.digest)
        size = sum(file.size for file in source.files)
        if size > request.size_max:
            raise InvalidInput("the version is larger than what was reserved for it")
        if request.source in self.silent:
            await asyncio.Event().wait()
        on_bytes(size // 2)
        try:
            await self._move(lane)
        except asyncio.CancelledError:
            await self.clock.sleep_ms(self.stop_ms)
            raise
        self.fetched += [file.sha256 for file in source.files if file.sha256 not in self.contents]
        self.contents |= {file.sha256 for file in source.files}
        if source.digest != request.digest:
            raise InvalidInput(f"the source has other content than the catalogue: {source.digest}")
        path = Path("/cache") / request.digest
        self.cached[request.digest] = CachedVersion(request.digest, path, size, self.clock.now_ms(), source.files)
        return self.cached[request.digest]

    async def remove(self, digest: Digest) -> None:
        """See `WeightCache.remove`."""
        self.cached.pop(digest, None)

    async def drop(self, keys: Collection[str]) -> None:
        """See `WeightCache.drop`."""
        self.contents -= set(keys)
        self.interrupted = [part for part in self.interrupted if part.key not in keys]

    async def _move(self, lane: Lane) -> None:
        left_ms = self.stage_ms
        while left_ms > 0 or not lane.is_open:
            await self.clock.sleep_ms(min(STEP_MS, left_ms) if lane.is_open else STEP_MS)
            left_ms -= STEP_MS if lane.is_open else 0

    def _source(self, path: str) -> FakeSource:
        if path not in self.sources:
            raise NotFound(f"there is no {path}")
        return self.sources[path]

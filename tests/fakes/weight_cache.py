"""The loader's disk cache in memory. Passes tests/contract/test_weight_cache.py as the real one does.

`sources` says what lies where: path → (digest, bytes). `stage_ms` is how long a copy takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import Digest
from services.loader.ports import CachedVersion


@dataclass(slots=True)
class FakeWeightCache:
    """`WeightCache` in a dictionary."""

    clock: Clock
    sources: dict[str, tuple[Digest, int]] = field(default_factory=dict)
    stage_ms: int = 0
    cached: dict[Digest, CachedVersion] = field(default_factory=dict)
    copies: list[Digest] = field(default_factory=list)
    """Every copy that was begun."""

    async def start(self) -> list[CachedVersion]:
        """See `WeightCache.start`."""
        return list(self.cached.values())

    async def measure(self, source_path: str) -> int:
        """See `WeightCache.measure`."""
        return self._source(source_path)[1]

    async def find(self, digest: Digest) -> CachedVersion | None:
        """See `WeightCache.find`."""
        return self.cached.get(digest)

    async def stage(
        self, source_path: str, digest: Digest, *, size_max: int, on_bytes: Callable[[int], None]
    ) -> CachedVersion:
        """See `WeightCache.stage`."""
        found, size = self._source(source_path)
        self.copies.append(digest)
        if size > size_max:
            raise InvalidInput("the source grew while it was copied")
        on_bytes(size // 2)
        await self.clock.sleep_ms(self.stage_ms)
        if found != digest:
            raise InvalidInput(f"the source has other content than the catalogue: {found}, not {digest}")
        self.cached[digest] = CachedVersion(digest, Path("/cache") / digest, size, self.clock.now_ms())
        return self.cached[digest]

    async def remove(self, digest: Digest) -> None:
        """See `WeightCache.remove`."""
        self.cached.pop(digest, None)

    def _source(self, path: str) -> tuple[Digest, int]:
        if path not in self.sources:
            raise NotFound(f"there is no {path}")
        return self.sources[path]

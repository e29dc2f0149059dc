"""The loader's disk cache: the fake and the real folder answer the same calls in the same way."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import version_digest
from roundhouse.clock import SystemClock
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import Digest
from services.loader.adapters.disk_cache import DiskCache
from services.loader.ports import WeightCache
from tests.fakes.weight_cache import FakeWeightCache

OTHER = Digest("sha256:" + "0" * 64)
SIZE = 7 + 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A version of two files."""
    folder = tmp_path / "source"
    (folder / "1").mkdir(parents=True)
    (folder / "config.json").write_bytes(b"config\n")
    (folder / "1" / "weights").write_bytes(b"12345")
    return folder


@pytest.fixture(params=["fake", "real"])
async def cache(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> AsyncIterator[WeightCache]:
    """Both sides, started."""
    fake = FakeWeightCache(SystemClock(), {str(source): (version_digest(source), SIZE)})
    real = DiskCache(tmp_path / "cache", SystemClock())
    made: WeightCache = fake if request.param == "fake" else real
    assert await made.start() == []
    yield made
    real.close()


def ignore(_: int) -> None:
    """No interest in progress."""


async def test_a_staged_version_is_found_by_its_digest(cache: WeightCache, source: Path) -> None:
    """Its size is that of its files; the second look finds it too."""
    digest = version_digest(source)
    assert await cache.measure(str(source)) == SIZE
    staged = await cache.stage(str(source), digest, size_max=SIZE, on_bytes=ignore)
    assert (staged.digest, staged.size) == (digest, SIZE)
    found = await cache.find(digest)
    assert found is not None
    assert found.path == staged.path


async def test_other_content_is_refused_and_leaves_nothing(cache: WeightCache, source: Path) -> None:
    """Invariant 10: what does not match the catalogue is never found."""
    with pytest.raises(InvalidInput):
        await cache.stage(str(source), OTHER, size_max=SIZE, on_bytes=ignore)
    assert await cache.find(OTHER) is None


async def test_a_source_larger_than_reserved_is_refused(cache: WeightCache, source: Path) -> None:
    """Invariant 6: a copy never takes more than was promised to it."""
    with pytest.raises(InvalidInput):
        await cache.stage(str(source), version_digest(source), size_max=SIZE - 1, on_bytes=ignore)
    assert await cache.find(version_digest(source)) is None


async def test_a_missing_source_is_not_found(cache: WeightCache, source: Path) -> None:
    """Both to measure and to stage."""
    with pytest.raises(NotFound):
        await cache.measure(str(source / "nowhere"))
    with pytest.raises(NotFound):
        await cache.stage(str(source / "nowhere"), OTHER, size_max=SIZE, on_bytes=ignore)


async def test_a_removed_version_is_gone(cache: WeightCache, source: Path) -> None:
    """Removing twice is the same as once."""
    digest = version_digest(source)
    await cache.stage(str(source), digest, size_max=SIZE, on_bytes=ignore)
    await cache.remove(digest)
    await cache.remove(digest)
    assert await cache.find(digest) is None

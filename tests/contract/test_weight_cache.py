"""The loader's disk cache: the fake and the real folder answer the same calls in the same way."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import version_digest, version_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import SystemClock
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import Digest
from services.loader.adapters.disk_cache import DiskCache
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic
from services.loader.ports import CachedVersion, FoundOnDisk, StageRequest, WeightCache
from tests.fakes.weight_cache import FakeSource, FakeWeightCache

OTHER = Digest("sha256:" + "0" * 64)
SIZE = 7 + 5


def files_of(folder: Path) -> tuple[ContentFile, ...]:
    """What the catalogue would list."""
    return tuple(
        ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in version_entries(folder)
    )


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
    lies_there = FakeSource(version_digest(source), files_of(source))
    fake = FakeWeightCache(SystemClock(), {str(source): lies_there})
    real = DiskCache(tmp_path / "cache", SystemClock())
    made: WeightCache = fake if request.param == "fake" else real
    assert await made.start() == FoundOnDisk()
    yield made
    real.close()


def ignore(_: int) -> None:
    """No interest in progress."""


async def stage(
    cache: WeightCache, source: Path, digest: Digest, files: tuple[ContentFile, ...] = (), size_max: int = SIZE
) -> CachedVersion:
    """Stage with an open lane."""
    with Traffic().lane(Priority.DEMAND) as lane:
        return await cache.stage(StageRequest(str(source), digest, files, size_max), lane, ignore)


@pytest.mark.parametrize("listed", [True, False])
async def test_a_staged_version_is_found_by_its_digest(cache: WeightCache, source: Path, listed: bool) -> None:
    """Its size is that of its files, and these have their hashes, whether the catalogue listed them or not."""
    digest = version_digest(source)
    staged = await stage(cache, source, digest, files_of(source) if listed else ())
    assert (staged.digest, staged.size, staged.files) == (digest, SIZE, files_of(source))
    found = await cache.find(digest)
    assert found is not None
    assert (found.path, found.files) == (staged.path, staged.files)


async def test_a_list_counts_only_if_the_digest_is_over_it(cache: WeightCache, source: Path) -> None:
    """Invariant 10: a list of files that is not the version's is not believed; the source is looked at."""
    digest, files = version_digest(source), files_of(source)
    right = await cache.look(StageRequest(str(source), digest, files))
    wrong = await cache.look(StageRequest(str(source), digest, files[:1]))
    assert right == files
    assert [(file.name, file.size, file.sha256) for file in wrong] == [(file.name, file.size, "") for file in files]


async def test_other_content_is_refused_and_is_not_found(cache: WeightCache, source: Path) -> None:
    """Invariant 10: what does not match the catalogue is never found."""
    with pytest.raises(InvalidInput):
        await stage(cache, source, OTHER)
    assert await cache.find(OTHER) is None


async def test_a_source_larger_than_reserved_is_refused(cache: WeightCache, source: Path) -> None:
    """Invariant 6: a copy never takes more than was promised to it."""
    with pytest.raises(InvalidInput):
        await stage(cache, source, version_digest(source), size_max=SIZE - 1)
    assert await cache.find(version_digest(source)) is None


async def test_a_missing_source_is_not_found(cache: WeightCache, source: Path) -> None:
    """Both to look at and to stage."""
    with pytest.raises(NotFound):
        await cache.look(StageRequest(str(source / "nowhere"), OTHER))
    with pytest.raises(NotFound):
        await stage(cache, source / "nowhere", OTHER)


async def test_a_removed_version_is_gone(cache: WeightCache, source: Path) -> None:
    """Removing and dropping twice is the same as once; it can be staged again."""
    digest = version_digest(source)
    await stage(cache, source, digest)
    for _ in range(2):
        await cache.remove(digest)
        await cache.drop([file.sha256 for file in files_of(source)])
    assert await cache.find(digest) is None
    assert (await stage(cache, source, digest)).digest == digest

"""What only the real disk cache has: files, names, time stamps and a lock."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import version_digest
from roundhouse.clock import SystemClock
from roundhouse.errors import InvalidInput, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.disk_cache import DiskCache
from services.loader.adapters.parallel_copy import REPORT_BYTES


def ignore(_: int) -> None:
    """No interest in progress."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A version of one file in a folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    """Not started yet."""
    made = DiskCache(tmp_path / "cache", SystemClock())
    yield made
    made.close()


async def test_the_copy_has_the_digest_of_the_source(cache: DiskCache, source: Path) -> None:
    """Invariant 10: the engine reads what the catalogue describes."""
    await cache.start()
    digest = version_digest(source)
    staged = await cache.stage(str(source), digest, size_max=5, on_bytes=ignore)
    assert version_digest(staged.path) == digest


async def test_a_version_of_one_file_is_given_as_that_file(cache: DiskCache, source: Path) -> None:
    """An `.onnx` file stays a file with its own name."""
    await cache.start()
    file = source / "weights"
    staged = await cache.stage(str(file), version_digest(file), size_max=5, on_bytes=ignore)
    assert staged.path.name == "weights"
    assert staged.path.read_bytes() == b"12345"


async def test_a_cached_file_that_was_cut_is_not_served(cache: DiskCache, source: Path) -> None:
    """Invariant 10, case B18: files that changed since they were verified are dropped and can be staged again."""
    await cache.start()
    digest = version_digest(source)
    staged = await cache.stage(str(source), digest, size_max=5, on_bytes=ignore)
    (staged.path / "weights").write_bytes(b"")
    assert await cache.find(digest) is None
    again = await cache.stage(str(source), digest, size_max=5, on_bytes=ignore)
    assert version_digest(again.path) == digest


async def test_leftovers_of_a_killed_process_go_at_start(cache: DiskCache, source: Path, tmp_path: Path) -> None:
    """Half-copied and half-deleted versions have no final name and are thrown away; whole ones stay."""
    await cache.start()
    digest = version_digest(source)
    await cache.stage(str(source), digest, size_max=5, on_bytes=ignore)
    for leftover in ("incoming/abc.1", "outgoing/def"):
        (tmp_path / "cache" / leftover / "content").mkdir(parents=True)
    cache.close()
    found = await cache.start()
    assert [version.digest for version in found] == [digest]
    assert list((tmp_path / "cache" / "incoming").iterdir()) == []
    assert list((tmp_path / "cache" / "outgoing").iterdir()) == []


async def test_two_processes_cannot_share_the_folder(cache: DiskCache, tmp_path: Path) -> None:
    """The second one is told so instead of cleaning up under the first."""
    await cache.start()
    with pytest.raises(Unavailable):
        await DiskCache(tmp_path / "cache", SystemClock()).start()


async def test_progress_is_reported_in_order(cache: DiskCache, source: Path) -> None:
    """Every `REPORT_BYTES`, on the loop, rising."""
    await cache.start()
    size = 2 * REPORT_BYTES + 1
    with (source / "weights").open("wb") as file:
        os.truncate(file.fileno(), size)
    reports: list[int] = []
    await cache.stage(str(source), version_digest(source), size_max=size, on_bytes=reports.append)
    assert reports == [REPORT_BYTES, 2 * REPORT_BYTES]


@pytest.mark.parametrize("digest", ["sha256:../../etc", "md5:" + "0" * 64, "sha256:" + "A" * 64])
async def test_what_is_no_digest_never_becomes_a_path(cache: DiskCache, digest: str) -> None:
    """A digest from outside cannot name another folder."""
    await cache.start()
    with pytest.raises(InvalidInput):
        await cache.find(Digest(digest))

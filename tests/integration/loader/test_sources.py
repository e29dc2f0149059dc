"""Versions from an HTTP server with ranges and from an S3-compatible store, over real connections of this machine.

The store's listing and reads are those of the S3 protocol as far as obstore uses it here; no real store was asked.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from obstore.store import HTTPStore, ObjectStore, S3Store

from roundhouse.catalogue.digests import version_digest, version_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import SystemClock
from roundhouse.errors import InvalidInput, NotFound, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.direct_io import CHUNK_BYTES
from services.loader.adapters.disk_cache import DiskCache
from services.loader.adapters.object_source import PART_BYTES, ObjectSource, headers_for
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic
from services.loader.ports import CachedVersion, StageRequest
from tests.integration.loader.range_server import RangeServer, range_server

STALL_MS = 1_500
SIZE = CHUNK_BYTES + 3 * PART_BYTES + 5


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version in the store, below a prefix."""
    folder = tmp_path / "store" / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "shard").write_bytes(os.urandom(SIZE))
    return folder


@pytest.fixture
def server(version: Path, tmp_path: Path) -> Iterator[RangeServer]:
    """The store's server."""
    with range_server(tmp_path / "store") as running:
        yield running


@pytest.fixture
async def cache(server: RangeServer, tmp_path: Path) -> AsyncIterator[DiskCache]:
    """A cache whose objects come from the server."""

    def open_store(root: str) -> ObjectStore:
        options = {"timeout": f"{STALL_MS}ms", "allow_http": True}
        retries = {"max_retries": 2, "retry_timeout": _seconds(STALL_MS)}
        if root.startswith("s3:"):
            return S3Store(
                "bucket",
                endpoint=server.url,
                region="nowhere",
                access_key_id="key",
                secret_access_key="secret",
                client_options=options,  # type: ignore[arg-type]
                retry_config=retries,  # type: ignore[arg-type]
            )
        return HTTPStore.from_url(f"{server.url}", client_options=options, retry_config=retries)  # type: ignore[arg-type]

    made = DiskCache(tmp_path / "cache", SystemClock(), ObjectSource(STALL_MS, open_store))
    await made.start()
    with closing(made):
        yield made


def _seconds(duration_ms: int) -> object:
    from datetime import timedelta

    return timedelta(milliseconds=duration_ms)


def files_of(folder: Path) -> tuple[ContentFile, ...]:
    """What the catalogue lists."""
    return tuple(ContentFile(name=e.name, size=e.size, sha256=e.sha256.hex()) for e in version_entries(folder))


async def stage(cache: DiskCache, source: str, digest: Digest, files: tuple[ContentFile, ...]) -> CachedVersion:
    """Stage with an open lane."""
    with Traffic().lane(Priority.DEMAND) as lane:
        return await cache.stage(StageRequest(source, digest, files, 2 * SIZE), lane, lambda _: None)


@pytest.mark.parametrize("source", ["http://host/bucket/models/m", "s3://bucket/models/m"])
async def test_a_version_comes_in_ranges_and_is_verified(
    cache: DiskCache, server: RangeServer, version: Path, source: str
) -> None:
    """Invariant 10: every byte once, in parts that a slow line can send within the limit."""
    staged = await stage(cache, source, version_digest(version), files_of(version))
    assert version_digest(staged.path) == version_digest(version)
    parts = sorted((first, last) for key, first, last in server.ranges if key.endswith("shard"))
    assert all(last - first < PART_BYTES for first, last in parts)
    assert sum(last - first + 1 for first, last in parts) == SIZE


async def test_a_store_is_listed_and_a_web_server_is_not(cache: DiskCache, version: Path) -> None:
    """Without a list in the catalogue S3 tells the files; HTTP cannot, and says so."""
    digest = version_digest(version)
    staged = await stage(cache, "s3://bucket/models/m", digest, ())
    assert [file.name for file in staged.files] == ["config.json", "shard"]
    with pytest.raises(InvalidInput, match="cannot be listed"):
        await cache.look(StageRequest("http://host/bucket/models/m", Digest("sha256:" + "0" * 64)))
    with pytest.raises(NotFound):
        await cache.look(StageRequest("s3://bucket/nowhere", Digest("sha256:" + "0" * 64)))


async def test_an_answer_that_breaks_off_is_asked_again(cache: DiskCache, server: RangeServer, version: Path) -> None:
    """Connections end; the version comes whole all the same."""
    server.break_next = 2
    staged = await stage(cache, "http://host/bucket/models/m", version_digest(version), files_of(version))
    assert version_digest(staged.path) == version_digest(version)


async def test_a_source_that_sends_nothing_is_told_with_its_cause(
    cache: DiskCache, server: RangeServer, version: Path, tmp_path: Path
) -> None:
    """Unavailable names the source and the limit; no half file is left; it works once the source does."""
    server.stall.set()
    source, digest, files = "http://host/bucket/models/m", version_digest(version), files_of(version)
    with pytest.raises(Unavailable, match=r"http://host/bucket/models/m gave nothing within 1\.5 s"):
        await stage(cache, source, digest, files)
    assert list((tmp_path / "cache" / "incoming").iterdir()) == []
    server.stall.clear()
    assert (await stage(cache, source, digest, files)).digest == digest


async def test_other_content_under_the_name_is_refused(cache: DiskCache, version: Path) -> None:
    """Invariant 10: the source is not trusted."""
    digest, files = version_digest(version), files_of(version)
    (version / "shard").write_bytes(os.urandom(SIZE))
    with pytest.raises(InvalidInput, match="other content"):
        await stage(cache, "s3://bucket/models/m", digest, files)
    with pytest.raises(NotFound):
        await stage(cache, "s3://bucket/models/gone", digest, files)


def test_a_token_goes_to_its_host_over_tls_only() -> None:
    """Another host, another port, plain text: no token. What is no pair is left out."""
    tokens = {"host": "secret", "other:8443": "second"}
    assert headers_for("https://host", tokens) == {"authorization": "Bearer secret"}
    assert headers_for("https://other:8443", tokens) == {"authorization": "Bearer second"}
    for root in ("http://host", "https://host:8443", "https://other", "https://host.evil"):
        assert headers_for(root, tokens) == {}


async def test_an_opened_server_gets_the_token(tmp_path: Path) -> None:
    """The library takes the header: opening an address of a host with a token raises nothing."""
    source = ObjectSource(STALL_MS, tokens={"127.0.0.1:1": "secret"})
    file = ContentFile(name="a", size=1, sha256="0" * 64)
    reader = source.open("https://127.0.0.1:1/m", file)
    with pytest.raises(Unavailable) as refused:
        reader.read_into(memoryview(bytearray(1)), 0)
    assert "secret" not in refused.value.message

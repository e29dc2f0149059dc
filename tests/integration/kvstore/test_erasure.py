"""Erasing a tenant in a real kvstore with a disk, by the adapter that the admin API uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.reference.kvstore_client import KvStoreClient
from roundhouse.wire.v1 import kv_pb2
from services.gateway.adapters.admin_caches import GrpcNodeCaches
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually
from tests.integration.kvstore.test_two_clients import ONE, SHAPE, TWO, blocks, found, keys, store


@pytest.fixture
def with_disk(tmp_path: Path) -> Iterator[KvStoreProcess]:
    """A kvstore of 4 MiB with a disk of 128 MiB."""
    process = KvStoreProcess(tmp_path, data_dir=tmp_path / "data")
    process.start()
    yield process
    process.close()


@pytest.fixture
def engine(with_disk: KvStoreProcess) -> Iterator[KvStoreClient]:
    """One engine's client."""
    client = KvStoreClient(with_disk.address, SHAPE, b"model")
    assert client.wait_until_mapped(10)
    yield client
    client.close()


def on_disk(kvstore: KvStoreProcess, salt: bytes) -> int:
    """Blocks of a salt on disk."""
    counts = kvstore.stub.GetStatistics(kv_pb2.GetStatisticsRequest(salt=salt), timeout=5)
    return int(counts.salt_disk_blocks)


def test_used_blocks_survive_the_process(with_disk: KvStoreProcess, engine: KvStoreClient) -> None:
    """3 blocks, used once, are on disk; killed and started again, the store gives them back bit for bit."""
    states = blocks(3)
    store(engine, ONE, keys(ONE, 3), states)
    assert len(found(engine, ONE, keys(ONE, 3))) == 3
    eventually(lambda: on_disk(with_disk, ONE) == 3)
    with_disk.kill()
    with_disk.start()
    eventually(lambda: len(found(engine, ONE, keys(ONE, 3))) == 3)
    read = found(engine, ONE, keys(ONE, 3))
    assert all((mine == theirs).all() for mine, theirs in zip(states, read, strict=True))


async def test_an_erased_tenant_counts_nothing_in_any_tier(with_disk: KvStoreProcess, engine: KvStoreClient) -> None:
    """3 blocks in memory and 3 on disk go; afterwards 0 are counted, also after a restart; the other tenant stays."""
    for salt in (ONE, TWO):
        store(engine, salt, keys(salt, 3), blocks(3))
        assert len(found(engine, salt, keys(salt, 3))) == 3
        eventually(lambda salt=salt: on_disk(with_disk, salt) == 3)
    erasure = await GrpcNodeCaches().erase(with_disk.address, ONE, timeout_ms=5_000)
    assert (erasure.blocks, erasure.blocks_left) == (6, 0)
    assert found(engine, ONE, keys(ONE, 3)) == ()
    with_disk.kill()
    with_disk.start()
    assert (on_disk(with_disk, ONE), on_disk(with_disk, TWO)) == (0, 3)

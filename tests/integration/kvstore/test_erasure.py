"""Erasing a tenant in a real kvstore with a disk, by the adapter that the admin API uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from engines.reference.kvstore_client import KvStoreClient
from roundhouse import subjects
from roundhouse.block_keys import tenant_salt
from roundhouse.clock import SystemClock
from roundhouse.event_bus import Message, connect_bus
from roundhouse.wire.v1 import events_pb2, kv_pb2
from services.gateway.adapters.admin_caches import GrpcNodeCaches, StreamedErasures
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
    counts = kvstore.stub.GetStatistics(kv_pb2.GetStatisticsRequest(salt=salt), timeout=60)
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


async def test_a_node_that_was_away_forgets_the_tenant_when_it_is_back(tmp_path: Path, nats_url: str) -> None:
    """It has 3 used blocks of two tenants on disk and is killed; the tenant is erased meanwhile, by an order that
    outlives everybody. Started again it drops them by itself, says so in the audit stream, and the other tenant's stay.
    What the tenant stores after that stays too, also over the next restart."""
    bus = await connect_bus(nats_url, name="test")
    told: list[events_pb2.AuditEvent] = []

    async def hear(message: Message) -> None:
        told.append(events_pb2.AuditEvent.FromString(message.data))

    await bus.subscribe(subjects.audit("cache_erased"), hear)
    process = KvStoreProcess(tmp_path, data_dir=tmp_path / "data", nats_url=nats_url, node_id="away")
    salts = one, two = tenant_salt("here", f"one-{tmp_path.name}"), tenant_salt("here", f"two-{tmp_path.name}")

    def stored(salt: bytes) -> None:
        client = KvStoreClient(process.address, SHAPE, b"model")
        assert client.wait_until_mapped(30)
        store(client, salt, keys(salt, 3), blocks(3))
        assert len(found(client, salt, keys(salt, 3))) == 3
        eventually(lambda: on_disk(process, salt) == 3)
        client.close()

    try:
        process.start()
        for salt in salts:
            await asyncio.to_thread(stored, salt)
        process.kill()
        await StreamedErasures(bus, SystemClock()).order("acme", sha256(one).digest())
        process.start()
        await asyncio.to_thread(eventually, lambda: on_disk(process, one) == 0, within_s=30)
        assert on_disk(process, two) == 3
        async with asyncio.timeout(30):
            while not told:
                await bus.client.flush()
        assert (told[0].actor, told[0].subject, told[0].details["blocks_left"]) == ("kvstore/away", "acme", "0")
        await asyncio.to_thread(stored, one)
        process.kill()
        process.start()
        await asyncio.to_thread(found_again, process, one)
    finally:
        process.close()
        await bus.close()


def found_again(process: KvStoreProcess, salt: bytes) -> None:
    """The blocks are read from disk."""
    client = KvStoreClient(process.address, SHAPE, b"model")
    assert client.wait_until_mapped(30)
    eventually(lambda: len(found(client, salt, keys(salt, 3))) == 3, within_s=30)
    client.close()

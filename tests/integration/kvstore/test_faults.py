"""What an engine sees when its kvstore dies, hangs or forgets, or its memory is wrong: misses, and then hits again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.reference.kv_cache import BlockSpace
from engines.reference.kvstore_client import KvStoreClient
from roundhouse import subjects
from roundhouse.block_keys import tenant_salt
from roundhouse.event_bus import Message, NatsBus
from roundhouse.wire.v1 import kv_pb2
from tests.infra import FaultyServer
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually
from tests.integration.kvstore.test_two_clients import ONE, SHAPE, blocks, found, keys, store


@pytest.fixture
def engine(kvstore: KvStoreProcess) -> Iterator[KvStoreClient]:
    """An engine's client with 4 blocks stored."""
    client = KvStoreClient(kvstore.address, SHAPE, b"model")
    assert client.wait_until_mapped(10)
    store(client, ONE, keys(ONE, 4), blocks(4))
    yield client
    client.close()


def test_a_killed_kvstore_is_misses_until_it_is_back(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """No exception, no old data: the new process has an empty arena, and the engine uses it by itself."""
    assert len(found(engine, ONE, keys(ONE, 4))) == 4
    kvstore.kill()
    assert engine.lookup(BlockSpace(ONE), keys(ONE, 4)).blocks == ()
    engine.offer(BlockSpace(ONE), keys(ONE, 1, first_token=900), blocks(1))
    assert engine.flush(10)
    assert engine.statistics().dropped == 1
    kvstore.start()
    assert "stale_arena_removed" in kvstore.log_text()

    def stored_again() -> bool:
        engine.offer(BlockSpace(ONE), keys(ONE, 4), blocks(4))
        assert engine.flush(10)
        return kvstore.statistics().blocks == 4

    eventually(stored_again)
    eventually(lambda: len(engine.lookup(BlockSpace(ONE), keys(ONE, 4)).blocks) == 4)


def test_an_engine_lets_go_of_a_dead_stores_memory_though_it_asks_for_nothing(
    kvstore: KvStoreProcess, engine: KvStoreClient
) -> None:
    """An arena takes most of what the machine has: while an idle engine maps the old one, no new one can be made."""
    assert str(kvstore.arena_path) in Path("/proc/self/maps").read_text()
    kvstore.kill()
    eventually(lambda: str(kvstore.arena_path) not in Path("/proc/self/maps").read_text(), within_s=30)
    kvstore.start()
    assert engine.wait_until_mapped(30)


def test_what_was_reserved_for_an_old_arena_is_given_back(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """The first offer after a restart gets slots of an arena that is not mapped: they are free again at once, and not
    only when their lease of 5 s ends, or nobody could store these blocks until then."""
    kvstore.kill()
    kvstore.start()

    def noticed() -> bool:
        engine.offer(BlockSpace(ONE), keys(ONE, 4), blocks(4))
        assert engine.flush(10)
        return kvstore.statistics().blocks == 4

    eventually(noticed, within_s=30)
    eventually(lambda: kvstore.statistics().leases == 0, within_s=4)  # less than the lease


def test_a_hung_kvstore_costs_each_request_little(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """The process is stopped: 10 lookups come back empty while it is, and the first one after it goes on works."""
    kvstore.signal(signal.SIGSTOP)
    assert [engine.lookup(BlockSpace(ONE), keys(ONE, 4)).blocks for _ in range(10)] == [()] * 10
    kvstore.signal(signal.SIGCONT)
    eventually(lambda: len(engine.lookup(BlockSpace(ONE), keys(ONE, 4)).blocks) == 4)


def test_a_flipped_byte_is_a_miss_and_the_block_is_dropped(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """Invariant 11: of 4 blocks the third is wrong: 2 are used, both sides count 1, 2 of 4 stay, and it can be stored
    again."""
    reply = kvstore.stub.AcquirePrefix(
        kv_pb2.AcquirePrefixRequest(salt=ONE, keys=keys(ONE, 4), client_id="test", lease_ms=1_000), timeout=60
    )
    kvstore.stub.ReleaseLease(kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id), timeout=60)
    kvstore.flip_byte(reply.blocks[2].offset + 1_000)
    assert len(found(engine, ONE, keys(ONE, 4))) == 2
    assert engine.flush(10)
    assert engine.statistics().corrupt == 1
    counts = kvstore.statistics()
    assert (counts.corrupt, counts.blocks, counts.slots_held) == (1, 2, 2)
    store(engine, ONE, keys(ONE, 4), blocks(4)[2:])
    assert len(found(engine, ONE, keys(ONE, 4))) == 4


def test_without_nats_blocks_are_served_and_readiness_says_why(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """Live and serving, not ready; metrics and logs hold no key."""
    assert kvstore.ops("/health/live")[0] == 200
    assert kvstore.ops("/health/ready")[0] == 503
    assert kvstore.conditions() == {"nats": "NATS does not answer"}
    assert len(found(engine, ONE, keys(ONE, 4))) == 4
    page = kvstore.ops("/metrics")[1]
    assert "roundhouse_kv_blocks 4.0" in page
    assert 'roundhouse_kv_arena_bytes{state="held"} 16384.0' in page
    assert ONE.hex() not in page + kvstore.log_text()


def test_series_do_not_grow_with_tenants(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """Invariant 17: 50 more tenants store a block each, and the metrics page has the same series as before."""

    def series() -> set[str]:
        page = kvstore.ops("/metrics")[1]
        return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}

    before = series()
    for tenant in range(50):
        salt = tenant_salt("cluster", f"tenant-{tenant}")
        store(engine, salt, keys(salt, 1), blocks(1))
    assert kvstore.statistics().blocks == 4 + 50
    assert series() == before


def test_a_clean_end_leaves_nothing(kvstore: KvStoreProcess) -> None:
    """Exit 0 and no arena file."""
    assert kvstore.arena_path.exists()
    assert kvstore.stop() == 0
    assert not kvstore.arena_path.exists()


async def test_schedulers_hear_of_blocks_when_nats_comes(nats_server: FaultyServer, tmp_path: Path) -> None:
    """NATS is killed at first: the kvstore starts, and once NATS is up it is ready and tells what it stores."""
    nats_server.kill()
    kvstore = KvStoreProcess(tmp_path, nats_url=nats_server.url)
    kvstore.start()
    try:
        nats_server.restart()
        eventually(lambda: kvstore.conditions() == {"nats": "ok"}, within_s=20)
        bus = await NatsBus.connect(nats_server.url, name="test")
        heard: list[kv_pb2.BlockEvents] = []
        told = asyncio.Event()

        async def hear(message: Message) -> None:
            event = kv_pb2.BlockEvents.FromString(message.data)
            if event.stored:  # else it repeats how far the sequence is, as every few seconds
                heard.append(event)
                told.set()

        await bus.subscribe(subjects.KV_BLOCKS, hear)
        client = KvStoreClient(kvstore.address, SHAPE, b"model")
        assert client.wait_until_mapped(10)
        store(client, ONE, keys(ONE, 2), blocks(2))
        client.close()
        async with asyncio.timeout(60):
            await told.wait()
        assert [(event.node_id, list(event.stored)) for event in heard] == [("node-1", keys(ONE, 2))]
        await bus.close()
    finally:
        kvstore.close()

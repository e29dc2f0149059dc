"""The queues in a real Valkey that forgets its scripts, dies, or is one node of a cluster."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from deploy.local.child import Command
from deploy.local.ports import free_ports
from deploy.local.probes import redis_probe
from deploy.local.server import Program
from deploy.local.stores import valkey_program
from roundhouse.clock import SystemClock
from roundhouse.event_bus import connect_bus
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import NodeId, Outcome, PoolName, PriorityClass, TenantId
from services.scheduler.adapters.redis_store import RedisSchedulingStore, pool_prefix
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    LoadClaim,
    LoadFailure,
    Offer,
    Progress,
    QueueEntry,
    RefusalReason,
    Room,
    Tokens,
    instance_key,
    version_key,
)
from services.scheduler.domain.residency import ClaimOrder, DrainOrder
from tests import infra
from tests.integration.scheduler.test_replicas import settle
from tests.simulation.scheduler.harness import World, world_on
from tests.simulation.scheduler.mesh import POOL, model


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[infra.FaultyServer]:
    """A Valkey that the test may kill."""
    with infra.valkey_running(tmp_path) as server:
        yield server


@asynccontextmanager
async def world_of(nats_url: str, redis_url: str) -> AsyncIterator[tuple[World, Any]]:
    """A world on real parts, and the client of its store."""
    bus = await connect_bus(nats_url, name="test")
    redis = open_redis(redis_url)
    try:
        async with world_on(bus, RedisSchedulingStore(redis), SystemClock()) as world:
            yield world, redis
    finally:
        await redis.aclose()
        await bus.close()


async def test_scripts_come_back_after_a_flush_amid_load(nats_url: str, redis_url: str) -> None:
    """SCRIPT FLUSH every few ms, as a failover to a replica that has none: each request still ends exactly once."""
    async with world_of(nats_url, redis_url) as (world, redis):
        m = model("m", slots=8)
        world.offer(m)
        await world.scheduler("s1")
        await world.scheduler("s2")
        node, gateway = await world.node(load_ms=100), await world.gateway()
        await asyncio.sleep(0.3)
        flushed = 0
        done = asyncio.Event()

        async def flush() -> None:
            nonlocal flushed
            while not done.is_set():
                await cast("Any", redis.script_flush())
                flushed += 1
                await asyncio.sleep(0.005)

        flushing = world.spawn(flush)
        requests = [gateway.ask(f"r{n}", m, run_ms=5, tenant_id=f"t{n % 3}") for n in range(150)]
        for start in range(0, len(requests), 10):
            await asyncio.gather(*(gateway.submit(each) for each in requests[start : start + 10]))
        await settle(gateway, within_s=60)
        done.set()
        await flushing
        assert flushed > 5
        assert gateway.outcomes() == {"done": 150}
        assert node.loads == ["m"]


async def test_the_queue_survives_a_valkey_that_is_killed(nats_url: str, own_valkey: infra.FaultyServer) -> None:
    """Invariants 1 and 18: killed with requests running and waiting, and back from its append-only file: running ones
    end as if nothing had been, waiting ones run afterwards, nothing runs twice, and no slot is lost."""
    async with world_of(nats_url, own_valkey.url) as (world, _):
        m = model("m", slots=2)
        world.offer(m)
        await world.scheduler("s1")
        await world.scheduler("s2")
        await world.node(load_ms=50)
        gateway = await world.gateway()
        await asyncio.sleep(0.3)
        requests = [gateway.ask(f"r{n}", m, run_ms=300, tenant_id=f"t{n % 3}") for n in range(12)]
        await asyncio.gather(*(gateway.submit(each) for each in requests))
        assert all(each.accepted for each in requests)
        await asyncio.sleep(0.4)
        await asyncio.to_thread(own_valkey.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_valkey.start)
        await settle(gateway, within_s=60)
        assert gateway.outcomes() == {"done": 12}
        for _ in range(600):  # the last endings come with a heartbeat if Valkey was away for them
            state = await world.store.snapshot(POOL, world.clock.now_ms())
            if not state.in_use and not state.depths:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(state)


@pytest.fixture
def cluster_node(tmp_path: Path) -> Iterator[str]:
    """A Valkey in cluster mode that holds all slots: it refuses a script that touches keys of two slots."""
    if infra.containers_wanted():
        pytest.skip("the container's options are fixed")

    def program(port: int, folder: Path) -> Program:
        plain = valkey_program("valkey", port, folder / "data", folder / "valkey.log")
        (bus_port,) = free_ports(1)
        argv = [*plain.command.argv, "--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
        return Program("valkey", Command(argv, folder / "valkey.log"), lambda: redis_probe(port), port)

    server = infra.ProgramServer(program, "redis://127.0.0.1:{port}/0", tmp_path)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


async def test_all_keys_of_a_pool_are_in_one_slot(cluster_node: str) -> None:
    """Every verb runs on a cluster node, and every key that it leaves has the slot of the pool's prefix."""
    redis = open_redis(cluster_node)
    ask = cast("Any", redis.execute_command)
    await ask("CLUSTER ADDSLOTSRANGE", 0, 16383)
    while (await ask("CLUSTER INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110 - a server has no event for this
        await asyncio.sleep(0.05)
    store = RedisSchedulingStore(redis)
    pools = [PoolName("shared"), PoolName("a b:{c}")]
    for pool in pools:
        await every_verb(store, pool)
    slots = {pool: await ask("CLUSTER KEYSLOT", pool_prefix(pool)) for pool in pools}
    keys = await cast("Any", redis.keys("*"))
    of = {pool: [key for key in keys if key.startswith(pool_prefix(pool).encode())] for pool in pools}
    assert sum(len(each) for each in of.values()) == len(keys)
    for pool in pools:
        assert len(of[pool]) > 15
        assert {await ask("CLUSTER KEYSLOT", key) for key in of[pool]} == {slots[pool]}
    await redis.aclose()


async def every_verb(store: RedisSchedulingStore, pool: PoolName) -> None:
    """Call each verb so that it has something to do."""
    version, node, now_ms = version_key("m", "sha256:1"), NodeId("n1"), 1_800_000_000_000
    instance = instance_key(node, version)

    def entry(name: str, deadline_ms: int = 60_000) -> QueueEntry:
        return QueueEntry(
            AttemptId(name), TenantId("{t}"), version, PriorityClass.STANDARD, 10, 10, now_ms + deadline_ms, 1_000, b"p"
        )

    for name in ("a", "b", "c", "d", "e"):
        await store.enqueue(pool, entry(name), Room(10, 1), now_ms)
    await store.enqueue(pool, entry("late", 100), Room(10, 1), now_ms)
    await store.take(pool, [Offer(instance, version, 3)], 3, now_ms)
    await store.renew(pool, [Progress(AttemptId("a"), Tokens(10, 0, 90))], now_ms)
    await store.finish(pool, [Ending(AttemptId("a"), Outcome.DONE, Tokens(10, 0, 10), 50)], now_ms)
    await store.cancel(pool, AttemptId("d"), now_ms)
    await store.cancel(pool, AttemptId("unknown"), now_ms)
    await store.claim_due(pool, now_ms + 1_000)
    await store.acknowledge(pool, [AttemptId("b")], now_ms)
    await store.begin_drain(pool, DrainOrder(instance, version, version, now_ms + 9_000, rotate=True), now_ms)
    state = await store.snapshot(pool, now_ms)
    claim = LoadClaim(node, "me", now_ms + 9_000, 7)
    await store.claim_load(pool, ClaimOrder(version, claim, state.revision), now_ms)
    await store.renew_load(pool, version, "me", now_ms + 9_000, now_ms)
    await store.release_load(pool, version, node, "me", LoadFailure(now_ms, 1, "x"), now_ms)
    await store.refuse(pool, version, now_ms + 10**6, RefusalReason.UNAVAILABLE, "x", now_ms)
    await store.expire(pool, now_ms + 20_000)

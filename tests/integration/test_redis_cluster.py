"""The store as a real cluster: three primaries with a replica each, slots that move, primaries that die.

The contract suites of all adapters run on one too: `ROUNDHOUSE_TEST_REDIS=cluster pytest tests/contract`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar, cast

import pytest
from redis.exceptions import RedisError

from roundhouse.cluster_map import slot_of
from roundhouse.errors import InvalidInput, Unavailable
from roundhouse.redis_edge import LuaScript, MeshRedis, open_redis
from roundhouse.vocabulary import KeyId, Outcome, PoolName, PriorityClass, TenantId
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.key_directory import RedisKeyDirectory
from services.gateway.domain.keys import INFERENCE, KeyRecord, key_hash
from services.scheduler.adapters.redis_history import RedisHistory
from services.scheduler.adapters.redis_store import RedisSchedulingStore, pool_prefix
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Offer,
    QueueEntry,
    Room,
    Settled,
    Tokens,
    instance_key,
    version_key,
)
from services.scheduler.domain.warmth.history import Entry, Happened
from tests.fakes.clock import ManualClock
from tests.valkey_cluster import ValkeyCluster, ValkeyNode

pytestmark = pytest.mark.timeout(180)

Result = TypeVar("Result")
TENANTS = [f"t{number}" for number in range(60)]
VERSION = version_key("m", "sha256:1")
INSTANCE = instance_key(cast("Any", "n1"), VERSION)
POOLS = [PoolName(f"pool-{number}") for number in range(12)]  # more than enough for every shard to have some
T0_MS = 1_800_000_000_000
spent = LuaScript("services.metering.adapters", "budget_spent.lua")


@pytest.fixture(params=["channel", "library"])
async def redis(request: pytest.FixtureRequest, redis_cluster: ValkeyCluster) -> AsyncIterator[MeshRedis]:
    """A client of the cluster; `library` is without the channel for scripts, as behind TLS."""
    async with opened(redis_cluster) as client:
        if request.param == "library":
            client.scripts = None
        yield client


@asynccontextmanager
async def opened(cluster: ValkeyCluster) -> AsyncIterator[MeshRedis]:
    """A client of a cluster, closed at the end."""
    client = open_redis(cluster.url)
    yield client
    await client.aclose()


async def sooner_or_later(call: Callable[[], Awaitable[Result]], within_s: float = 60) -> Result:
    """What callers do: ask again while the store is away."""
    deadline = monotonic() + within_s
    while True:
        try:
            return await call()
        except (Unavailable, RedisError):
            if monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


def budget(tenant: str) -> tuple[list[str], list[str | bytes | int | float]]:
    """A call of a script with the keys of one tenant."""
    return [f"rh:{{t:{tenant}}}:budget"], [7, 60_000, 0]


async def test_each_command_and_each_script_finds_its_node(redis: MeshRedis, redis_cluster: ValkeyCluster) -> None:
    """60 tenants: their keys lie on all three primaries, read back and written by scripts called one by one and
    together, also when no node knows the script any more."""
    for tenant in TENANTS:
        await redis.set(f"rh:{{t:{tenant}}}:x", tenant)
    assert [await redis.get(f"rh:{{t:{tenant}}}:x") for tenant in TENANTS] == [name.encode() for name in TENANTS]
    assert await spent.each(redis, [budget(tenant) for tenant in TENANTS]) == [7] * 60
    for node in redis_cluster.nodes:
        node.ask("SCRIPT FLUSH")
    assert await spent(redis, *budget("t1")) == 7
    assert await spent.each(redis, [budget(tenant) for tenant in TENANTS]) == [7] * 60
    sizes = [node.ask("DBSIZE") for node in redis_cluster.primaries]
    assert sum(sizes) == 120
    assert min(sizes) > 0
    assert await cast("Any", redis).ping()
    assert (await cast("Any", redis).time())[0] > 0


async def test_what_the_services_keep_works_in_a_cluster(redis: MeshRedis) -> None:
    """Keys of tenants in several slots are made, found, revoked; the history of pools is written and read."""
    registry, clock = RedisKeyRegistry(redis), ManualClock()
    directory = RedisKeyDirectory(redis, clock)
    for number, tenant in enumerate(TENANTS[:12]):
        text = f"rh-{number:043d}"
        record = KeyRecord(
            KeyId(f"key-{number}"), TenantId(tenant), key_hash(text), frozenset({INFERENCE}), "", T0_MS, 0
        )
        await registry.add(record)
        assert (await directory.identify(text, fresh=True)).tenant_id == tenant
        assert (await registry.revoke(record.key_id, T0_MS)).revoked_ms == T0_MS
        assert [each.key_id for each in await registry.of_tenant(TenantId(tenant))] == [record.key_id]
    history = RedisHistory(redis)
    for pool in POOLS:
        await history.append(pool, Entry(5, {VERSION: Happened(1, 2, 300, 40, 2)}))
        entries, _ = await history.after(pool, "")
        assert [entry.at_ms for entry in entries] == [5]


async def test_cancelled_calls_give_nobody_anothers_answer(redis: MeshRedis) -> None:
    """Case B37 over many nodes: every second of 300 reads is cancelled; the others get what they asked for."""
    for tenant in TENANTS:
        await redis.set(f"rh:{{t:{tenant}}}:x", tenant)
    for _ in range(5):
        asked = {tenant: asyncio.ensure_future(redis.get(f"rh:{{t:{tenant}}}:x")) for tenant in TENANTS}
        await asyncio.sleep(0)
        for tenant in TENANTS[::2]:
            asked[tenant].cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
        for tenant, answer in asked.items():
            assert answer.cancelled() or answer.result() == tenant.encode()
    # Bounded however many ask at once: 32 connections a node, and one for scripts.
    assert await asyncio.gather(*(redis.get(f"rh:{{t:{tenant}}}:x") for tenant in TENANTS * 5))


async def test_a_slot_that_moved_is_followed(redis: MeshRedis, redis_cluster: ValkeyCluster) -> None:
    """Between two calls the slot of a pool moves at once, and back: MOVED is followed by commands and by scripts."""
    key = pool_prefix(POOLS[0])
    store = RedisSchedulingStore(redis)
    await store.enqueue(POOLS[0], entry("a"), Room(10, 1), T0_MS)
    await redis.set(f"{key}seen", "before")
    there, here = redis_cluster.primary_of(key), None
    for _ in range(2):
        here = next(node for node in redis_cluster.primaries if node is not there)
        there.ask("CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot_of(key), slot_of(key), "NODE", here.id)
        await asyncio.to_thread(redis_cluster.wait_promoted, key, there)
        assert await redis.get(f"{key}seen") == b"before"
        assert await sooner_or_later(lambda: store.snapshot(POOLS[0], T0_MS))
        there = here
    taken = await store.take(POOLS[0], [Offer(INSTANCE, VERSION, 3)], 3, T0_MS)
    assert [ticket.attempt for ticket in taken.granted] == ["a"]


async def test_no_script_runs_on_half_a_slot(redis: MeshRedis, redis_cluster: ValkeyCluster) -> None:
    """A slot that moves key by key: single keys are found on either side, a script runs on neither before its end."""
    key = pool_prefix(POOLS[1])
    store = RedisSchedulingStore(redis)
    await store.enqueue(POOLS[1], entry("a"), Room(10, 1), T0_MS)
    source = redis_cluster.primary_of(key)
    target = next(node for node in redis_cluster.primaries if node is not source)
    slot = slot_of(key)
    target.ask("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
    await redis.set(f"{key}new", "made over there")
    assert await redis.get(f"{key}new") == b"made over there"
    with pytest.raises(Unavailable):
        await store.take(POOLS[1], [Offer(INSTANCE, VERSION, 3)], 3, T0_MS)
    assert target.ask("CLUSTER COUNTKEYSINSLOT", slot) == 1, "only the new key: the script left nothing there"
    for name in source.ask("CLUSTER GETKEYSINSLOT", slot, 100):
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    for node in (target, source, next(node for node in redis_cluster.primaries if node not in (source, target))):
        node.ask("CLUSTER SETSLOT", slot, "NODE", target.id)
    taken = await sooner_or_later(lambda: store.take(POOLS[1], [Offer(INSTANCE, VERSION, 3)], 3, T0_MS))
    assert [ticket.attempt for ticket in taken.granted] == ["a"]


async def test_a_primary_that_dies_is_replaced_and_nothing_runs_twice(redis_cluster: ValkeyCluster) -> None:
    """kill -9 of one primary: pools on the others go on at once; on its replica the queue is as it was: granted
    attempts end once, the waiting one is granted once, and the scripts are sent anew."""
    async with opened(redis_cluster) as redis:
        store = RedisSchedulingStore(redis)
        for pool in POOLS:
            for name in ("a", "b", "c"):
                await store.enqueue(pool, entry(name), Room(10, 1), T0_MS)
            assert len((await store.take(pool, [Offer(INSTANCE, VERSION, 2)], 2, T0_MS)).granted) == 2
        victim = redis_cluster.primary_of(pool_prefix(POOLS[0]))
        away = [pool for pool in POOLS if redis_cluster.primary_of(pool_prefix(pool)) is victim]
        await asyncio.to_thread(in_step, victim)
        victim.kill()
        try:
            for pool in set(POOLS) - set(away):
                assert await store.snapshot(pool, T0_MS)
            with pytest.raises(Unavailable):
                await store.snapshot(away[0], T0_MS)
            assert await cast("Any", redis).ping(), "the readiness of services: the other shards serve"
            for pool in away:
                await ends_and_goes_on(store, pool)
        finally:
            await asyncio.to_thread(victim.start)
            await asyncio.to_thread(redis_cluster.wait_healthy)


async def ends_and_goes_on(store: RedisSchedulingStore, pool: PoolName) -> None:
    """One attempt ends, so one more is granted; the same again changes nothing."""
    ended = [Ending(AttemptId("a"), Outcome.DONE, Tokens(10, 0, 10), 50)]
    finished = await sooner_or_later(lambda: store.finish(pool, ended, T0_MS + 1_000))
    assert finished == (Settled(VERSION),)
    assert await store.finish(pool, ended, T0_MS + 1_000) != finished
    assert [
        ticket.attempt
        for _ in range(2)
        for ticket in (await store.take(pool, [Offer(INSTANCE, VERSION, 2)], 2, T0_MS + 1_000)).granted
    ] == ["c"]


def in_step(primary: ValkeyNode) -> None:
    """Wait until its replica has everything: replication is asynchronous, and a test wants no chance in it."""
    assert primary.ask("WAIT", 1, 30_000) == 1


def entry(name: str) -> QueueEntry:
    """One request."""
    return QueueEntry(
        AttemptId(name), TenantId("t"), VERSION, PriorityClass.STANDARD, 10, 10, T0_MS + 60_000, 1_000, b"p"
    )


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+cluster://a:1,", "redis+cluster://a:1/3", "redis+cluster://a:port"]
)
def test_a_wrong_address_of_a_cluster_is_refused(url: str) -> None:
    """At start, with what is wanted."""
    with pytest.raises(InvalidInput, match="host:port"):
        open_redis(url)


async def test_a_cluster_that_is_away_is_unavailable() -> None:
    """Nobody answers on any of the addresses: scripts and commands fail, none hangs."""
    redis = open_redis("redis+cluster://u:p@127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(Unavailable):
        await spent(redis, *budget("t"))
    with pytest.raises(RedisError):
        await redis.get("x")
    with pytest.raises(RedisError):
        await cast("Any", redis).ping()
    await redis.aclose()

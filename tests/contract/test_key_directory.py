"""What every key directory and registry does, and how long the real one remembers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from roundhouse.catalogue.records import ScopeLimits
from roundhouse.errors import NotFound, Unauthenticated, Unavailable
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.adapters import key_directory, redis_names
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.key_directory import KNOWN_MS, UNKNOWN_MS, RedisKeyDirectory
from services.gateway.domain.keys import ADMIN, BOOTSTRAP_KEY_ID, INFERENCE, OPERATORS, KeyRecord, key_hash
from tests.fakes.admission import InMemoryKeys
from tests.fakes.clock import ManualClock
from tests.infra import FaultyServer

BOOTSTRAP = "rh-admin-" + "b" * 43
K1 = "rh-" + "1" * 43
K2 = "rh-" + "2" * 43


@dataclass
class World:
    """Two gateways' directories and the registry that both read."""

    a: Any
    b: Any
    registry: Any
    clock: ManualClock

    async def add(self, text: str, *, key_id: str = "key-1", expires_ms: int = 0, scope: str = INFERENCE) -> KeyRecord:
        """Make a key with a known text."""
        record = KeyRecord(
            KeyId(key_id), TenantId("acme"), key_hash(text), frozenset({scope}), "note", self.clock.now_ms(), expires_ms
        )
        await self.registry.add(record)
        return record


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """No keys but the bootstrap key."""
    clock = ManualClock()
    if request.param == "memory":
        keys = InMemoryKeys(clock, admin_key_hash=key_hash(BOOTSTRAP))
        yield World(keys, keys, keys, clock)
        return
    redis = open_redis(request.getfixturevalue("redis_url"))
    directories = [RedisKeyDirectory(redis, clock, admin_key_hash=key_hash(BOOTSTRAP).upper()) for _ in range(2)]
    yield World(directories[0], directories[1], RedisKeyRegistry(redis), clock)
    await redis.aclose()


async def test_a_key_names_its_tenant_and_scopes(world: World) -> None:
    """Invariant 16: who calls is what the registry says of the key."""
    await world.add(K1)
    caller = await world.a.identify(K1)
    assert (caller.tenant_id, caller.key_id, caller.scopes) == ("acme", "key-1", {INFERENCE})
    assert caller.key_hash == key_hash(K1)


@pytest.mark.parametrize(
    "text", ["", "rh-", K1[:-1], K1 + " ", "Bearer " + K1, "rh-" + "é" * 43, K1 + "\n", "x" * 10_000]
)
@pytest.mark.parametrize("fresh", [False, True])
async def test_what_is_no_key_is_refused(world: World, text: str, fresh: bool) -> None:
    """Unknown, cut, padded, of other characters or endless: one message for all, and it repeats nothing."""
    await world.add(K1)
    with pytest.raises(Unauthenticated) as refused:
        await world.a.identify(text, fresh=fresh)
    assert refused.value.message == "the API key is not valid"


async def test_the_bootstrap_key_is_an_operator(world: World) -> None:
    """It is in no store, so it works before anything else does."""
    caller = await world.a.identify(BOOTSTRAP, fresh=True)
    assert (caller.tenant_id, caller.key_id, caller.scopes) == (OPERATORS, BOOTSTRAP_KEY_ID, {ADMIN})


async def test_a_revoked_key_is_refused_everywhere_at_once(world: World) -> None:
    """B06: both gateways know the key; after revoking, 50 calls to each with `fresh` succeed 0 times."""
    await world.add(K1)
    await world.a.identify(K1)
    await world.b.identify(K1)
    await world.registry.revoke(KeyId("key-1"), world.clock.now_ms())
    for _ in range(50):
        for gateway in (world.a, world.b):
            with pytest.raises(Unauthenticated):
                await gateway.identify(K1, fresh=True)
        world.clock.advance(1_200)


async def test_a_revoked_admin_key_is_refused_at_once(world: World) -> None:
    """B06: the admin's own way in has the same check."""
    await world.add(K1, scope=ADMIN)
    await world.b.identify(K1, fresh=True)
    await world.registry.revoke(KeyId("key-1"), world.clock.now_ms())
    with pytest.raises(Unauthenticated):
        await world.b.identify(K1, fresh=True)


async def test_even_code_that_does_not_ask_forgets_a_revoked_key_soon(world: World) -> None:
    """B06: without `fresh` and without admission, a second is the bound."""
    await world.add(K1)
    await world.b.identify(K1)
    await world.registry.revoke(KeyId("key-1"), world.clock.now_ms())
    world.clock.advance(KNOWN_MS)
    with pytest.raises(Unauthenticated):
        await world.b.identify(K1)


async def test_a_key_expires_by_the_clock(world: World) -> None:
    """Also where it is remembered."""
    await world.add(K1, expires_ms=world.clock.now_ms() + 1_000)
    await world.a.identify(K1)
    world.clock.advance(999)
    await world.a.identify(K1)
    world.clock.advance(1)
    with pytest.raises(Unauthenticated):
        await world.a.identify(K1)


async def test_a_key_tried_before_it_was_made_works_soon_after(world: World) -> None:
    """That there was no such key is remembered for at most a second."""
    with pytest.raises(Unauthenticated):
        await world.a.identify(K1)
    await world.add(K1)
    world.clock.advance(UNKNOWN_MS)
    await world.a.identify(K1)


async def test_revoking_is_idempotent_and_only_of_what_there_is(world: World) -> None:
    """The first time counts as the time of revoking; other keys go on."""
    await world.add(K1)
    await world.add(K2, key_id="key-2")
    first = await world.registry.revoke(KeyId("key-1"), 1_000)
    again = await world.registry.revoke(KeyId("key-1"), 2_000)
    assert first.revoked_ms == again.revoked_ms == 1_000
    with pytest.raises(NotFound):
        await world.registry.revoke(KeyId("key-none"), 1_000)
    assert (await world.a.identify(K2, fresh=True)).key_id == "key-2"


async def test_a_key_that_is_to_end_ends_everywhere_at_that_time(world: World) -> None:
    """Rotation: both gateways know the key; its end is moved to 1 s from now, and never later again."""
    await world.add(K1)
    for gateway in (world.a, world.b):
        await gateway.identify(K1)
    ends_ms = world.clock.now_ms() + 1_000
    for at_ms in (ends_ms, ends_ms + 9_000):
        assert (await world.registry.end_at(KeyId("key-1"), at_ms, now_ms=world.clock.now_ms())).expires_ms == ends_ms
    world.clock.advance(999)
    for gateway in (world.a, world.b):
        await gateway.identify(K1, fresh=True)
    world.clock.advance(1)
    for gateway in (world.a, world.b):
        with pytest.raises(Unauthenticated):
            await gateway.identify(K1, fresh=True)
    with pytest.raises(NotFound):
        await world.registry.end_at(KeyId("key-none"), ends_ms, now_ms=world.clock.now_ms())


async def test_a_revoked_key_does_not_come_back_by_ending_it_later(world: World) -> None:
    """Case B06: a rotation that meets a revocation leaves the key dead."""
    await world.add(K1)
    await world.registry.revoke(KeyId("key-1"), world.clock.now_ms())
    now_ms = world.clock.now_ms()
    await world.registry.end_at(KeyId("key-1"), now_ms + 60_000, now_ms=now_ms)
    with pytest.raises(Unauthenticated):
        await world.a.identify(K1, fresh=True)


async def test_the_entry_of_a_key_that_is_to_end_stays_until_then(redis_url: str) -> None:
    """A rotation with a week's overlap: the index, which every call reads first, has the old key for all of that week
    (it once had it for a day only, and the key was refused for the six others)."""
    redis, clock, week_ms = open_redis(redis_url), ManualClock(), 7 * 24 * 3_600_000
    registry = RedisKeyRegistry(redis)
    record = KeyRecord(KeyId("key-1"), TenantId("acme"), key_hash(K1), frozenset({INFERENCE}), "", clock.now_ms(), 0)
    await registry.add(record)
    await registry.end_at(KeyId("key-1"), clock.now_ms() + week_ms, now_ms=clock.now_ms())
    assert await redis.pttl(redis_names.key_index(key_hash(K1))) > week_ms
    await redis.aclose()


@pytest.mark.parametrize("step", ["_find", "_note"])
async def test_a_key_that_is_revoked_while_its_end_is_moved_stays_dead(redis_url: str, step: str) -> None:
    """Case B06: a rotation has read the old key, or has just noted its end, when somebody revokes it: the rotation's
    next write brings neither the alive mark nor the index entry back, and it tells that the key is revoked."""
    redis, clock = open_redis(redis_url), ManualClock()
    registry, other = RedisKeyRegistry(redis), RedisKeyRegistry(redis)
    record = KeyRecord(KeyId("key-1"), TenantId("acme"), key_hash(K1), frozenset({INFERENCE}), "", clock.now_ms(), 0)
    await registry.add(record)
    real = getattr(registry, step)

    async def then_revoked(*args: Any, **kwargs: Any) -> Any:
        done = await real(*args, **kwargs)
        await other.revoke(KeyId("key-1"), 5)
        return done

    setattr(registry, step, then_revoked)
    await registry.end_at(KeyId("key-1"), clock.now_ms() + 60_000, now_ms=clock.now_ms())
    assert await redis.hget(redis_names.alive_keys(TenantId("acme")), key_hash(K1)) is None  # type: ignore[misc]
    assert await redis.get(redis_names.key_index(key_hash(K1))) is None
    assert (await other.find(KeyId("key-1"))).revoked_ms == 5
    await redis.aclose()


async def test_a_keys_own_limits_are_told_with_it(world: World) -> None:
    """Admission gets them from whoever calls."""
    own = ScopeLimits(requests_per_minute=3)
    record = KeyRecord(
        KeyId("key-1"), TenantId("acme"), key_hash(K1), frozenset({INFERENCE}), "", world.clock.now_ms(), 0, limits=own
    )
    await world.registry.add(record)
    assert (await world.a.identify(K1)).limits == own
    assert (await world.registry.find(KeyId("key-1"))).limits == own


async def test_keys_are_listed_oldest_first_with_ended_ones(world: World) -> None:
    """What operators see: no text, everything else."""
    first = await world.add(K1)
    world.clock.advance(1)
    second = await world.add(K2, key_id="key-0")
    await world.registry.revoke(KeyId("key-1"), 5)
    found = await world.registry.of_tenant(TenantId("acme"))
    assert [record.key_id for record in found] == [first.key_id, second.key_id]
    assert [record.state(world.clock.now_ms()) for record in found] == ["revoked", "active"]
    assert await world.registry.of_tenant(TenantId("other")) == []


async def test_the_memory_is_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers who try endless keys fill no memory; the newest are kept."""
    monkeypatch.setattr(key_directory, "ENTRIES_MAX", 3)
    redis = open_redis(redis_url)
    directory = RedisKeyDirectory(redis, ManualClock())
    for number in range(10):
        with pytest.raises(Unauthenticated):
            await directory.identify(f"rh-{number:043d}")
    assert len(directory._memory) == 3
    await redis.aclose()


async def test_no_key_text_is_stored_or_remembered(redis_url: str) -> None:
    """Invariant 16: neither the store nor the process holds what would open the door."""
    redis = open_redis(redis_url)
    clock = ManualClock()
    registry, directory = RedisKeyRegistry(redis), RedisKeyDirectory(redis, clock)
    record = KeyRecord(KeyId("key-1"), TenantId("acme"), key_hash(K1), frozenset({INFERENCE}), "", clock.now_ms(), 0)
    await registry.add(record)
    await directory.identify(K1)
    dumped = b""
    for key in await redis.keys("*"):
        dumped += key + (await redis.dump(key) or b"")
    assert K1.encode() not in dumped
    assert K1 not in repr(directory._memory)
    await redis.aclose()


async def test_without_the_store_nobody_new_is_believed(valkey_server: FaultyServer) -> None:
    """B06: a lost store is Unavailable, never a yes; the bootstrap key still works."""
    redis = open_redis(valkey_server.url)
    directory = RedisKeyDirectory(redis, ManualClock(), admin_key_hash=key_hash(BOOTSTRAP))
    valkey_server.kill()
    with pytest.raises(Unavailable):
        await directory.identify(K1)
    with pytest.raises(Unavailable):
        await RedisKeyRegistry(redis).of_tenant(TenantId("acme"))
    assert (await asyncio.wait_for(directory.identify(BOOTSTRAP), 1)).scopes == {ADMIN}
    await redis.aclose()

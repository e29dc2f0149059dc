"""What every store of kept answers does: the script on a real store, and the in-memory twin."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import TenantId
from services.gateway.adapters import answer_store
from services.gateway.adapters.answer_store import RedisAnswerStore
from services.gateway.domain.idempotency import (
    ANSWER_BYTES_MAX,
    KEPT_MS,
    LEASE_MS,
    Answer,
    Busy,
    Claimed,
    Differs,
    Full,
    Kept,
)
from tests.fakes import answer_store as fake_store
from tests.fakes.answer_store import InMemoryAnswerStore
from tests.fakes.clock import ManualClock

ACME, GLOBEX = TenantId("acme"), TenantId("globex")
ANSWER = Answer(200, (("content-type", "application/json"),), b'{"text":"the secret answer"}', "r1")


@dataclass
class World:
    """A store and its clock."""

    store: Any
    clock: ManualClock
    redis: Any = None

    async def claim(self, key: str = "k", body: str = "f", owner: str = "a", tenant: TenantId = ACME) -> Any:
        """One claim."""
        return await self.store.claim(tenant, key, body, owner)


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """An empty store."""
    clock = ManualClock()
    if request.param == "memory":
        yield World(InMemoryAnswerStore(clock), clock)
        return
    redis = open_redis(request.getfixturevalue("redis_url"))
    yield World(RedisAnswerStore(redis, clock=clock), clock, redis)
    await redis.aclose()


async def test_the_first_runs_and_the_others_get_its_answer(world: World) -> None:
    """Of 20 claims at once one is granted; when it is kept, everybody gets it, byte for byte."""
    outcomes = await asyncio.gather(*(world.claim(owner=f"o{number}") for number in range(20)))
    assert outcomes.count(Claimed()) == 1
    assert outcomes.count(Busy()) == 19
    winner = f"o{outcomes.index(Claimed())}"
    await world.store.keep(ACME, "k", winner, ANSWER)
    assert await world.claim(owner="late") == Kept(ANSWER)


async def test_another_body_differs_while_it_runs_and_afterwards(world: World) -> None:
    """The key is bound to the first body."""
    await world.claim()
    assert await world.claim(body="other", owner="b") == Differs()
    await world.store.keep(ACME, "k", "a", ANSWER)
    assert await world.claim(body="other", owner="b") == Differs()


async def test_a_released_key_is_free_for_any_body(world: World) -> None:
    """A refused or failed request leaves nothing behind."""
    await world.claim()
    await world.store.release(ACME, "k", "a")
    assert await world.claim(body="other", owner="b") == Claimed()


async def test_a_dead_owner_loses_its_claim_and_cannot_end_the_next_ones(world: World) -> None:
    """After the lease a twin takes over; what the old owner says then has no effect."""
    await world.claim()
    world.clock.advance(LEASE_MS - 1)
    assert await world.claim(owner="b") == Busy()
    await world.store.renew(ACME, "k", "a")
    world.clock.advance(LEASE_MS - 1)
    assert await world.claim(owner="b") == Busy()
    world.clock.advance(1)
    assert await world.claim(owner="b") == Claimed()
    await world.store.keep(ACME, "k", "a", ANSWER)
    await world.store.release(ACME, "k", "a")
    await world.store.renew(ACME, "k", "a")
    assert await world.claim(owner="c") == Busy()
    await world.store.keep(ACME, "k", "b", ANSWER)
    assert await world.claim(owner="c") == Kept(ANSWER)


async def test_a_claim_is_idempotent_by_owner(world: World) -> None:
    """A repeated call of the one who has it is granted again."""
    assert await world.claim() == Claimed()
    assert await world.claim() == Claimed()


async def test_tenants_do_not_meet(world: World) -> None:
    """Invariant 16: the same key of another tenant is another key."""
    await world.claim()
    await world.store.keep(ACME, "k", "a", ANSWER)
    assert await world.claim(tenant=GLOBEX, owner="b") == Claimed()


async def test_an_answer_that_is_too_long_is_known_but_not_kept(world: World) -> None:
    """The request is not run again, and the caller is told why there is nothing to read."""
    await world.claim()
    await world.store.keep(ACME, "k", "a", replace(ANSWER, body=b"x" * (ANSWER_BYTES_MAX + 1)))
    assert await world.claim(owner="b") == Kept(None)


async def test_kept_answers_are_bounded_and_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for 2 keys the third is refused until the first ends, a day after it came."""
    for module in (answer_store, fake_store):
        monkeypatch.setattr(module, "TENANT_ANSWERS_MAX", 2)
    await world.claim("one")
    await world.store.keep(ACME, "one", "a", ANSWER)
    world.clock.advance(1_000)
    await world.claim("two")
    assert await world.claim("three") == Full(KEPT_MS - 1_000)
    assert await world.claim("three", tenant=GLOBEX) == Claimed()
    world.clock.advance(KEPT_MS - 1_000)
    assert await world.claim("three") == Claimed()


async def test_bytes_are_bounded_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as many bytes are kept as may be, no further key is taken, and kept ones are still answered."""
    for module in (answer_store, fake_store):
        monkeypatch.setattr(module, "TENANT_BYTES_MAX", 10)
    await world.claim()
    await world.store.keep(ACME, "k", "a", ANSWER)
    assert isinstance(await world.claim("other"), Full)
    assert await world.claim(owner="b") == Kept(ANSWER)


async def test_a_tenant_is_erased(world: World) -> None:
    """Everything of it, at once, and nothing of another."""
    for key in ("one", "two"):
        await world.claim(key)
        await world.store.keep(ACME, key, "a", ANSWER)
    await world.claim("one", tenant=GLOBEX)
    assert await world.store.erase(ACME) == 2
    assert await world.store.erase(ACME) == 0
    assert await world.claim("one", owner="b") == Claimed()
    assert await world.claim("one", tenant=GLOBEX, owner="b") == Busy()
    if world.redis is not None:
        await world.store.erase(ACME)
        assert [key for key in await world.redis.keys("rh:{t:acme}*") if b"acme" in key] == []


async def test_no_answer_and_no_key_lies_in_the_store_in_the_clear(redis_url: str) -> None:
    """Invariant 16: a dump of the store holds neither the text nor the key it was kept for."""
    redis: Any = open_redis(redis_url)
    store = RedisAnswerStore(redis)
    key = "5c0b2f0e-my-key"
    await store.claim(ACME, key, "f", "a")
    await store.keep(ACME, key, "a", ANSWER)
    dumped = b"".join([name + (await redis.dump(name) or b"") for name in await redis.keys("rh:{t:acme}*")])
    assert b"secret" not in dumped
    assert key.encode() not in dumped
    assert await store.claim(ACME, key, "f", "b") == Kept(ANSWER)
    [entry] = [name for name in await redis.keys("rh:{t:acme}*") if b":answer:" in name]
    await redis.hset(entry, "answer", b"\x00" * 64)  # changed by somebody: better none than another's
    assert await store.claim(ACME, key, "f", "b") == Kept(None)
    await redis.aclose()

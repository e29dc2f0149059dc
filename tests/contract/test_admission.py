"""What every `Admission` does: the script on a real store, through two gateways, and the in-memory twin."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from roundhouse.catalogue.records import Limits
from roundhouse.errors import Conflict, LimitExceeded, Unauthenticated
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import KeyId, RequestId, TenantId
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.admission import RedisAdmission
from services.gateway.domain.keys import INFERENCE, KeyRecord, key_hash
from services.gateway.domain.limits import ScopedLimits
from services.gateway.ports import Admitted, Caller
from tests.fakes.admission import InMemoryAdmission, InMemoryKeys
from tests.fakes.clock import ManualClock

ACME = TenantId("acme")
HASH = key_hash("rh-" + "a" * 43)
CALLER = Caller(ACME, KeyId("key-1"), frozenset({INFERENCE}), HASH)
UNLIMITED = Limits()


@dataclass
class World:
    """Two gateways' admissions over one store, with a clock that stands still."""

    gateways: tuple[Any, Any]
    registry: Any
    clock: ManualClock
    redis: Any = None
    ids: "count[int]" = field(default_factory=count)

    async def admit(
        self,
        limits: Limits,
        tokens: int = 1,
        *,
        gateway: int = 0,
        request: str = "",
        also: tuple[ScopedLimits, ...] = (),
        caller: Caller = CALLER,
    ) -> Admitted:
        """One request with a fresh id."""
        request_id = RequestId(request or f"r{next(self.ids)}")
        admitted: Admitted = await self.gateways[gateway].admit(
            caller, request_id, limits, input_tokens=0, reserve_tokens=tokens, also=also
        )
        return admitted


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A tenant with one living key."""
    clock = ManualClock()
    record = KeyRecord(CALLER.key_id, ACME, HASH, frozenset({INFERENCE}), "", clock.now_ms(), 0)
    if request.param == "memory":
        keys = InMemoryKeys(clock)
        await keys.add(record)
        admission = InMemoryAdmission(clock, keys)
        yield World((admission, admission), keys, clock)
        return
    redis = open_redis(request.getfixturevalue("redis_url"))
    other = open_redis(request.getfixturevalue("redis_url"))
    registry = RedisKeyRegistry(redis)
    await registry.add(record)
    gateways = (RedisAdmission(redis, clock=clock), RedisAdmission(other, clock=clock))
    yield World(gateways, registry, clock, redis)
    await redis.aclose()
    await other.aclose()


async def test_exactly_the_limit_passes_through_two_gateways(world: World) -> None:
    """B09: of 50 requests at once through two gateways, 10 a minute lets exactly 10 through, in each of 3 rounds."""
    limits = Limits(requests_per_minute=10)
    for _ in range(3):
        calls = [world.admit(limits, gateway=number % 2) for number in range(50)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Admitted) for answer in answers) == 10
        assert sum(isinstance(answer, LimitExceeded) for answer in answers) == 40
        world.clock.advance(60_000)  # 10 a minute × 1 minute = the whole bucket


async def test_reserved_and_used_tokens_never_pass_the_limit(world: World) -> None:
    """B09: 100 tokens a minute and 20 a request: 5 at once; what they did not use is there again after settling."""
    limits = Limits(tokens_per_minute=100)
    calls = [world.admit(limits, 20, gateway=number % 2) for number in range(50)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    admitted = [answer for answer in answers if isinstance(answer, Admitted)]
    assert len(admitted) == 5  # 5 × 20 = 100
    for held in admitted:
        await world.gateways[0].settle(held, used_tokens=4)
    after = await world.admit(limits, 80)  # 100 - 5 × 4 = 80
    assert after.remaining_tokens == 0


async def test_a_limit_that_does_not_divide_the_minute_is_exact(world: World) -> None:
    """7 a minute lets 7 through at once, although 60,000 / 7 ms is no whole number."""
    limits = Limits(requests_per_minute=7)
    assert [(await world.admit(limits)).remaining_requests for _ in range(7)] == [6, 5, 4, 3, 2, 1, 0]
    with pytest.raises(LimitExceeded):
        await world.admit(limits)


async def test_the_named_wait_is_enough_and_not_too_long(world: World) -> None:
    """B12: one millisecond before the named time is too early, at the named time there is room."""
    limits = Limits(requests_per_minute=7)
    for _ in range(7):
        await world.admit(limits)
    with pytest.raises(LimitExceeded) as refused:
        await world.admit(limits)
    wait_ms = refused.value.retry_after_ms
    assert wait_ms == 8_572  # one of 7 drains in 60,000 / 7 = 8,571.4 ms
    world.clock.advance(wait_ms - 1)
    with pytest.raises(LimitExceeded) as early:
        await world.admit(limits)
    assert early.value.retry_after_ms == 1
    world.clock.advance(1)
    await world.admit(limits)


async def test_refused_takes_nothing_of_any_limit(world: World) -> None:
    """Invariant 15: a request refused by one limit leaves the others and the lease count as they were."""
    limits = Limits(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=2)
    await world.admit(limits, 50)
    for _ in range(5):
        with pytest.raises(LimitExceeded):
            await world.admit(limits, 60)
    after = await world.admit(limits, 50)
    assert (after.remaining_requests, after.remaining_tokens) == (8, 0)  # 10 - 2, 100 - 2 × 50


async def test_a_request_above_the_limit_is_told_that_waiting_does_not_help(world: World) -> None:
    """B12: 101 tokens never fit 100 a minute: no time is named, because none would be true."""
    with pytest.raises(LimitExceeded) as refused:
        await world.admit(Limits(tokens_per_minute=100), 101)
    assert refused.value.retry_after_ms is None
    assert "100 tokens a minute" in refused.value.message


@pytest.mark.parametrize("name", ["requests_per_minute", "concurrent_requests"])
async def test_a_limit_of_zero_lets_nothing_through(world: World, name: str) -> None:
    """Zero means none, for ever."""
    with pytest.raises(LimitExceeded) as refused:
        await world.admit(Limits(**{name: 0}))
    assert refused.value.retry_after_ms is None


async def test_the_longest_wait_of_two_limits_is_named(world: World) -> None:
    """B12: with both limits reached, the time after which both have room."""
    limits = Limits(requests_per_minute=1, tokens_per_minute=100)
    await world.admit(limits, 100)
    with pytest.raises(LimitExceeded) as refused:
        await world.admit(limits, 50)  # tokens: 30,000 ms for 50 of 100; requests: 60,000 ms for 1 of 1
    assert refused.value.retry_after_ms == 60_000
    assert "requests a minute" in refused.value.message


async def test_concurrency_is_given_back_when_settled(world: World) -> None:
    """B10: with a limit of 2, 20 requests that end early leave nothing behind."""
    limits = Limits(concurrent_requests=2)
    for _ in range(20):
        held = await world.admit(limits)
        await world.gateways[1].settle(held, used_tokens=0)
    await world.admit(limits)
    await world.admit(limits)
    with pytest.raises(LimitExceeded) as refused:
        await world.admit(limits)
    assert refused.value.retry_after_ms == 1_000


async def test_concurrency_of_a_dead_gateway_comes_back_within_the_lease(world: World) -> None:
    """B10: two leases that nobody renews are gone after 30 s; renewed ones stay."""
    limits = Limits(concurrent_requests=2)
    dead = await world.admit(limits)
    alive = await world.admit(limits)
    world.clock.advance(20_000)
    await world.gateways[1].renew([alive])
    world.clock.advance(10_000)  # 30 s since `dead` came, 10 s since `alive` was renewed
    await world.admit(limits)
    with pytest.raises(LimitExceeded):
        await world.admit(limits)
    await world.gateways[0].settle(dead, used_tokens=1)  # late, and harmless


async def test_renewing_what_was_settled_brings_no_lease_back(world: World) -> None:
    """A renewal that overtakes a settlement must not lock the slot again."""
    limits = Limits(concurrent_requests=1)
    held = await world.admit(limits)
    await world.gateways[0].settle(held, used_tokens=1)
    await world.gateways[0].renew([held])
    again = await world.admit(limits)
    assert again.ticket != held.ticket


async def test_renewing_nothing_is_nothing(world: World) -> None:
    """A gateway without requests renews each second all the same; the one slot is still there."""
    await world.gateways[0].renew([])
    await world.admit(Limits(concurrent_requests=1))
    with pytest.raises(LimitExceeded):
        await world.admit(Limits(concurrent_requests=1))


async def test_a_repeated_admission_is_one(world: World) -> None:
    """The same request id, through another gateway, gets the first answer and takes nothing more."""
    limits = Limits(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=1)
    first = await world.admit(limits, 30, request="same")
    again = await world.admit(limits, 30, gateway=1, request="same")
    assert again == first
    assert (first.remaining_requests, first.remaining_tokens) == (9, 70)
    assert (first.reset_requests_ms, first.reset_tokens_ms) == (6_000, 18_000)  # 1/10 and 30/100 of a minute


async def test_settling_twice_gives_back_once(world: World) -> None:
    """Idempotent: the second settlement, whatever it says, changes nothing."""
    limits = Limits(tokens_per_minute=100)
    held = await world.admit(limits, 100)
    await world.gateways[0].settle(held, used_tokens=70)
    await world.gateways[1].settle(held, used_tokens=0)
    with pytest.raises(LimitExceeded):
        await world.admit(limits, 31)
    await world.admit(limits, 30)


async def test_using_more_than_reserved_is_charged(world: World) -> None:
    """Tokens above the reservation count too: the meter may stand above the limit and drains first."""
    limits = Limits(tokens_per_minute=60)
    held = await world.admit(limits, 10)
    await world.gateways[0].settle(held, used_tokens=90)
    with pytest.raises(LimitExceeded) as refused:
        await world.admit(limits, 10)
    assert refused.value.retry_after_ms == 40_000  # 90 + 10 - 60 = 40 tokens at one a second


async def test_what_drained_while_it_was_reserved_is_not_given_back(world: World) -> None:
    """A reservation is no way to save up quota: only what has not drained is given back.

    At 0 s 100 of 100 are reserved; at 30 s 50 have drained and 50 more are reserved; the first used 20. Of its unused
    80, 30 have drained (50 drained - 20 used), so 50 come back: 100 - 50 = 50 in use."""
    limits = Limits(tokens_per_minute=100)
    first = await world.admit(limits, 100)
    world.clock.advance(30_000)
    await world.admit(limits, 50)
    await world.gateways[0].settle(first, used_tokens=20)
    with pytest.raises(LimitExceeded):
        await world.admit(limits, 51)
    await world.admit(limits, 50)


async def test_a_withdrawn_request_was_never_there(world: World) -> None:
    """Invariant 15: withdrawing gives back the request, its tokens and its lease; again is no different."""
    limits = Limits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1)
    held = await world.admit(limits, 10)
    for _ in range(2):
        await world.gateways[1].withdraw(ACME, held.ticket)
    after = await world.admit(limits, 10)
    assert (after.remaining_requests, after.remaining_tokens) == (0, 0)


async def test_an_admission_that_arrives_after_its_withdrawal_takes_nothing(world: World) -> None:
    """B37: a cancelled call may reach the store after the withdrawal; it must not hold a slot then."""
    limits = Limits(concurrent_requests=1)
    await world.gateways[0].withdraw(ACME, RequestId("late"))
    with pytest.raises(Conflict):
        await world.admit(limits, request="late")
    await world.admit(limits)


async def test_a_revoked_key_is_refused_at_once_everywhere(world: World) -> None:
    """B06: the check is in the same step as the limits, so there is no other gateway that still believes the key."""
    await world.admit(UNLIMITED, gateway=1)
    await world.registry.revoke(CALLER.key_id, world.clock.now_ms())
    for gateway in (0, 1):
        with pytest.raises(Unauthenticated):
            await world.admit(UNLIMITED, gateway=gateway)


async def test_a_key_ends_when_it_expires(world: World) -> None:
    """An expiry needs nobody to act on it."""
    late = KeyRecord(
        KeyId("key-2"), ACME, key_hash("rh-late"), frozenset({INFERENCE}), "", 0, world.clock.now_ms() + 1_000
    )
    await world.registry.add(late)
    caller = Caller(ACME, late.key_id, late.scopes, late.key_hash)
    world.clock.advance(999)
    await world.gateways[0].admit(caller, RequestId("a"), UNLIMITED, input_tokens=1, reserve_tokens=1)
    world.clock.advance(1)
    with pytest.raises(Unauthenticated):
        await world.gateways[0].admit(caller, RequestId("b"), UNLIMITED, input_tokens=1, reserve_tokens=1)


async def test_without_limits_nothing_is_refused(world: World) -> None:
    """No limit is no limit, and says so."""
    answers = [await world.admit(UNLIMITED, 1_000_000) for _ in range(50)]
    assert {answer.remaining_requests for answer in answers} == {None}
    assert {answer.remaining_tokens for answer in answers} == {None}


async def test_tenants_do_not_share_limits(world: World) -> None:
    """B09: another tenant's use changes nothing."""
    limits = Limits(requests_per_minute=1)
    await world.admit(limits)
    other = KeyRecord(KeyId("key-3"), TenantId("other"), key_hash("rh-o"), frozenset({INFERENCE}), "", 0, 0)
    await world.registry.add(other)
    caller = Caller(other.tenant_id, other.key_id, other.scopes, other.key_hash)
    admitted = await world.gateways[0].admit(caller, RequestId("x"), limits, input_tokens=1, reserve_tokens=1)
    assert admitted.remaining_requests == 0


async def test_a_raised_limit_counts_what_was_used_under_the_old_one(world: World) -> None:
    """10 used of 10; raised to 15 a minute there are 5 more."""
    for _ in range(10):
        await world.admit(Limits(requests_per_minute=10))
    raised = Limits(requests_per_minute=15)
    assert (await world.admit(raised)).remaining_requests == 4


KEY_1 = ScopedLimits("k:key-1", requests_per_minute=3)
KEY_2 = ScopedLimits("k:key-2", requests_per_minute=3)
MODEL = ScopedLimits("m:chat", tokens_per_minute=100, concurrent_requests=2)


async def test_a_keys_own_limit_is_exact_and_its_own(world: World) -> None:
    """B09: of 20 at once with a key's limit of 3, 3 pass; another key of the tenant has its own 3."""
    for own in (KEY_1, KEY_2):
        calls = [world.admit(UNLIMITED, gateway=number % 2, also=(own,)) for number in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Admitted) for answer in answers) == 3
        assert all(
            "3 requests a minute of this key" in str(answer) for answer in answers if isinstance(answer, Exception)
        )


async def test_what_one_scope_refuses_takes_nothing_of_the_others(world: World) -> None:
    """Invariant 15: tenant 10 a minute, key 3 a minute, model 2 at once: refused ones leave all three as they were."""
    limits = Limits(requests_per_minute=10)
    first = await world.admit(limits, 10, also=(KEY_1, MODEL))
    await world.admit(limits, 10, also=(KEY_1, MODEL))
    for _ in range(5):
        with pytest.raises(LimitExceeded) as refused:
            await world.admit(limits, 10, also=(KEY_1, MODEL))  # the third at once
        assert "2 requests at once of this model" in refused.value.message
    await world.gateways[1].settle(first, used_tokens=4)
    after = await world.admit(limits, 10, also=(KEY_1, MODEL))
    assert (after.remaining_requests, after.requests_limit) == (0, 3)  # the key's 3 - 3, less than the tenant's 10 - 3
    assert (after.remaining_tokens, after.tokens_limit) == (76, 100)  # 100 - 4 - 10 - 10
    assert (await world.admit(limits)).remaining_requests == 6  # 10 - 4: five refusals took nothing


async def test_a_withdrawn_request_is_given_back_in_every_scope(world: World) -> None:
    """Invariant 15: key and model have their whole limits again."""
    for _ in range(5):
        held = await world.admit(UNLIMITED, 100, also=(KEY_1, MODEL))
        await world.gateways[1].withdraw(ACME, held.ticket)


async def test_leases_of_every_scope_are_renewed_and_end_by_themselves(world: World) -> None:
    """B10: two at once of a model; renewed after 20 s they hold at 40 s, and unrenewed they are gone at 60 s."""
    held = [await world.admit(UNLIMITED, also=(MODEL,)) for _ in range(2)]
    world.clock.advance(20_000)
    await world.gateways[1].renew(held)
    world.clock.advance(20_000)
    with pytest.raises(LimitExceeded):
        await world.admit(UNLIMITED, also=(MODEL,))
    world.clock.advance(20_000)
    await world.admit(UNLIMITED, also=(MODEL,))


async def test_a_token_of_an_issuer_is_admitted_until_it_expires(world: World) -> None:
    """It has no key to be alive; the store's clock ends it."""
    caller = Caller(ACME, KeyId("jwt-1"), frozenset({INFERENCE}), "", expires_ms=world.clock.now_ms() + 1_000)
    world.clock.advance(999)
    await world.admit(UNLIMITED, caller=caller)
    world.clock.advance(1)
    with pytest.raises(Unauthenticated):
        await world.admit(UNLIMITED, caller=caller)

"""Budgets in every `Admission`: spent, reserved and asked are compared in the one step, in whole micro-units."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from roundhouse.budgets import budget_key, spent_field
from roundhouse.catalogue.records import Budget, Limits
from roundhouse.errors import BudgetExhausted, LimitExceeded
from roundhouse.redis_edge import LuaScript, open_redis
from roundhouse.vocabulary import KeyId, RequestId, TenantId
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.admission import RedisAdmission
from services.gateway.domain.budgets import SETTLED_HOLD_MS, Money, Purse, Refused, Tariff
from services.gateway.domain.keys import INFERENCE, KeyRecord, key_hash
from services.gateway.domain.limits import LEASE_MS
from services.gateway.ports import Admitted, Caller
from tests import infra
from tests.fakes.admission import InMemoryAdmission, InMemoryKeys
from tests.fakes.clock import ManualClock

ACME = TenantId("acme")
HASH = key_hash("rh-" + "a" * 43)
CALLER = Caller(ACME, KeyId("key-1"), frozenset({INFERENCE}), HASH)
RECORD = KeyRecord(CALLER.key_id, ACME, HASH, frozenset({INFERENCE}), "", 0, 0)
BUDGET = Budget(amount="0.0001")  # 100 micro-units
PERIOD = "2026-11"
UNLIMITED = Limits()

# What metering writes (services/metering/adapters/budget_spent.lua); here the store alone is under test.
count_script = LuaScript("services.metering.adapters", "budget_spent.lua")


def asks(cost: int, budget: Budget = BUDGET, period: str = PERIOD) -> Money:
    """A request that may cost so many micro-units."""
    return Money(budget, period, cost, Tariff())


@dataclass
class World:
    """One tenant's admission, and the ledger's word on what it spent."""

    admission: Any
    clock: ManualClock
    redis: Any = None
    sequence: int = 0
    spent: int = 0

    async def admit(self, name: str, cost: int, limits: Limits = UNLIMITED, **money: Any) -> Admitted:
        """Ask for a request."""
        admitted: Admitted = await self.admission.admit(
            CALLER, RequestId(name), limits, input_tokens=0, reserve_tokens=1, money=[asks(cost, **money)]
        )
        return admitted

    async def count(self, name: str, cost: int) -> None:
        """The ledger has a row of a request."""
        self.sequence += 1
        self.spent += cost
        if self.redis is None:
            self.admission.purses[ACME, ""] = self.admission.purses[ACME, ""].count(name, cost)
            return
        field = spent_field(PERIOD, "USD")
        await count_script(
            self.redis, [budget_key(ACME)], [self.sequence, 10**9, 1, field, self.spent, self.sequence, name]
        )


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A tenant with a budget of 100 micro-units."""
    clock = ManualClock()
    if request.param == "memory":
        keys = InMemoryKeys(clock)
        await keys.add(RECORD)
        yield World(InMemoryAdmission(clock, keys), clock)
        return
    redis = open_redis(request.getfixturevalue("redis_url"))
    await RedisKeyRegistry(redis).add(RECORD)
    yield World(RedisAdmission(redis, clock=clock), clock, redis)
    await redis.aclose()


async def test_reservations_and_spend_together_stay_within_the_budget(world: World) -> None:
    """60 reserved, 40 more fit, 1 does not; the refusal names what is left and what was asked, and takes nothing."""
    first = await world.admit("r1", 60)
    with pytest.raises(BudgetExhausted) as refused:
        await world.admit("r2", 41)
    assert refused.value.message == (
        "the budget of 0.0001 USD for the month 2026-11 has 0.00004 left, and this request may cost up to 0.000041:"
        " allow fewer output tokens, or raise the budget"
    )
    await world.admit("r3", 40)
    with pytest.raises(BudgetExhausted, match=r"is spent \(with what running requests may cost\)"):
        await world.admit("r4", 1)
    await world.admission.settle(first, used_tokens=1, costs={"": 10})
    await world.admit("r5", 50)  # 100 - 10 - 40


async def test_a_cost_is_counted_once_between_its_end_and_its_ledger_row(world: World) -> None:
    """Settled at 30 and not in the ledger yet: 70 are left; in the ledger: still 70. The row may come first, too."""
    first = await world.admit("r1", 60)
    await world.admission.settle(first, used_tokens=1, costs={"": 30})
    for _ in range(2):
        with pytest.raises(BudgetExhausted):
            await world.admit("big", 71)
        await world.count("r1", 30) if world.spent == 0 else None
    second = await world.admit("r2", 70)
    await world.count("r2", 20)
    await world.admission.settle(second, used_tokens=1, costs={"": 20})
    with pytest.raises(BudgetExhausted):
        await world.admit("r3", 51)  # 100 - 30 - 20
    await world.admit("r3", 50)


async def test_a_request_of_a_dead_gateway_gives_its_reservation_back(world: World) -> None:
    """Renewed it is held on; not renewed it ends with the concurrency lease; settled it is held for an hour."""
    held = await world.admit("r1", 60)
    world.clock.advance(LEASE_MS - 1)
    await world.admission.renew([held])
    world.clock.advance(LEASE_MS - 1)
    with pytest.raises(BudgetExhausted):
        await world.admit("r2", 41)
    world.clock.advance(1)
    second = await world.admit("r2", 100)
    await world.admission.settle(second, used_tokens=1, costs={"": 100})
    world.clock.advance(SETTLED_HOLD_MS - 1)
    with pytest.raises(BudgetExhausted):
        await world.admit("r3", 1)
    world.clock.advance(1)
    await world.admit("r3", 1)


async def test_withdrawn_and_repeated_calls_change_no_money(world: World) -> None:
    """Invariant 15: a refused request reserves nothing; a repeated admission reserves once; a withdrawn one nothing."""
    await world.admit("r1", 50)
    await world.admit("r1", 50)
    await world.admission.withdraw(ACME, RequestId("r1"))
    with pytest.raises(LimitExceeded):
        await world.admit("r2", 90, Limits(requests_per_minute=0))
    await world.admit("r3", 100)


async def test_a_new_period_starts_at_nothing_and_a_free_request_always_fits(world: World) -> None:
    """Spent in November says nothing of December; a model without a price runs in a period that is spent exactly."""
    await world.count("old", 100)
    with pytest.raises(BudgetExhausted, match=r"2026-11 is spent$"):
        await world.admit("r1", 1)
    await world.admit("r2", 0)
    if world.redis is not None:
        await world.admit("r3", 100, period="2026-12")


async def test_budgets_of_a_key_and_a_model_are_taken_with_the_tenants_or_not_at_all(world: World) -> None:
    """Tenant 100, key 70, model 50, another currency's budget 5. What one of them refuses takes nothing of the others;
    settled, each has what the request cost in its own currency."""
    key, model = Budget(amount="0.00007"), Budget(amount="0.00005")
    euros = Budget(amount="0.000005", currency="EUR")

    async def admit(name: str, cost: int, scope: str = "m:small") -> Admitted:
        money = [asks(cost), replace(asks(cost, key), scope="k:key-1"), replace(asks(cost, model), scope=scope)]
        if scope == "m:abroad":
            money[2] = replace(asks(cost // 10, euros), scope=scope)
        admitted: Admitted = await world.admission.admit(
            CALLER, RequestId(name), UNLIMITED, input_tokens=0, reserve_tokens=1, money=money
        )
        return admitted

    first = await admit("r1", 40)
    with pytest.raises(BudgetExhausted, match=r"2026-11 of this model has 0.00001 left"):
        await admit("r2", 20)
    second = await admit("r3", 30, "m:abroad")  # the key has 70 - 40 = 30 left: nothing was taken by r2
    with pytest.raises(BudgetExhausted, match=r"of this key is spent \(with what running requests may cost\)"):
        await admit("r4", 1, "m:other")
    await world.admission.renew([first, second])
    await world.admission.settle(first, used_tokens=1, costs={"": 10, "k:key-1": 10, "m:small": 10})
    await world.admission.settle(second, used_tokens=1, costs={"": 20, "k:key-1": 20, "m:abroad": 2})
    with pytest.raises(BudgetExhausted, match="of this key"):
        await admit("r5", 41, "m:other")
    with pytest.raises(BudgetExhausted, match="of this model"):
        await admit("r5", 40, "m:abroad")  # 4 asked, 3 left
    await admit("r5", 40)  # the model has 40 left, the key 40
    await world.admission.withdraw(ACME, RequestId("r5"))
    await admit("r6", 40)


async def test_many_at_once_never_overspend(world: World) -> None:
    """Of 50 concurrent requests that may cost 7 each, 14 are admitted: 14 × 7 = 98, one more would be 105."""
    calls = [world.admit(f"r{number}", 7) for number in range(50)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, Admitted) for answer in answers) == 14
    assert sum(isinstance(answer, BudgetExhausted) for answer in answers) == 36


class PurseMachine(RuleBasedStateMachine):
    """The scripts in a real store against the twin; and whatever happens, nothing is overspent."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        infra.flush_redis(self.url)
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.redis = open_redis(self.url)
        self.world = World(RedisAdmission(self.redis, clock=self.clock), self.clock, self.redis)
        self.purse = Purse()
        self.names = (f"r{number}" for number in count())
        self.running: dict[str, tuple[Admitted, int]] = {}
        self.ended: dict[str, int] = {}  # settled and not in the ledger
        self.runner.run(RedisKeyRegistry(self.redis).add(RECORD))

    def teardown(self) -> None:
        """Close what was opened."""
        self.runner.run(self.redis.aclose())
        self.runner.close()

    @rule(cost=st.integers(0, 60))
    def admit(self, cost: int) -> None:
        """A request comes."""
        name = next(self.names)
        expected = self.purse.admit(name, cost, 100, self.clock.now_ms())
        try:
            admitted = self.runner.run(self.world.admit(name, cost))
        except BudgetExhausted:
            assert isinstance(expected, Refused)
            self.purse = self.purse.at(self.clock.now_ms())
            return
        assert isinstance(expected, Purse)
        self.purse, self.running[name] = expected, (admitted, cost)

    @rule(share=st.integers(0, 100))
    def settle(self, share: int) -> None:
        """The oldest request ends; it cost a part of what it might have."""
        if self.running:
            name, (admitted, most) = next(iter(self.running.items()))
            del self.running[name]
            self.ended[name] = most * share // 100
            self.runner.run(self.world.admission.settle(admitted, used_tokens=1, costs={"": self.ended[name]}))
            self.purse = self.purse.settle(name, self.ended[name], self.clock.now_ms())

    @rule()
    def count(self) -> None:
        """The ledger has the oldest ended request."""
        if self.ended:
            name, cost = next(iter(self.ended.items()))
            del self.ended[name]
            if cost:
                self.runner.run(self.world.count(name, cost))
                self.purse = self.purse.count(name, cost)

    @rule(duration_ms=st.integers(1, 20_000))
    def heartbeat(self, duration_ms: int) -> None:
        """Time passes; the gateway renews what runs."""
        self.clock.advance(duration_ms)
        if self.running:
            self.runner.run(self.world.admission.renew([admitted for admitted, _ in self.running.values()]))
        for name in self.running:
            self.purse = self.purse.renew(name, self.clock.now_ms())

    @invariant()
    def store_and_twin_agree(self) -> None:
        """What is reserved is the sum of the reservations, and the same in both."""
        key = budget_key(ACME)
        amounts: dict[bytes, bytes] = self.runner.run(self.redis.hgetall(f"{key}:amounts"))  # type: ignore[arg-type]
        assert {name.decode(): int(amount) for name, amount in amounts.items()} == {
            name: amount for name, (amount, _) in self.purse.holds.items()
        }
        reserved: bytes | None = self.runner.run(self.redis.hget(key, "reserved"))  # type: ignore[arg-type]
        assert int(reserved or 0) == self.purse.reserved

    @invariant()
    def nothing_is_overspent(self) -> None:
        """Spent, and all that running and uncounted requests may still cost, fit the budget."""
        assert self.purse.spent + sum(cost for _, cost in self.running.values()) + sum(self.ended.values()) <= 100


def test_the_scripts_do_as_their_twin_and_never_overspend(redis_url: str) -> None:
    """Any order of admissions, endings, ledger rows and heartbeats."""
    machine = type("Machine", (PurseMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )

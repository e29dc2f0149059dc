"""The scripts in Redis and their pure twin decide alike, whatever happens in whatever order and whenever."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from roundhouse.catalogue.records import Limits
from roundhouse.errors import Conflict, LimitExceeded
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import KeyId, RequestId, TenantId
from services.gateway.adapters import redis_names
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.admission import RedisAdmission
from services.gateway.domain import limits as twin
from services.gateway.domain.keys import INFERENCE, KeyRecord
from services.gateway.ports import Admitted, Caller
from tests import infra
from tests.fakes.clock import ManualClock

ACME = TenantId("acme")
CALLER = Caller(ACME, KeyId("key-1"), frozenset({INFERENCE}), "ab" * 32)
RATES = st.sampled_from([None, 0, 1, 3, 7, 60, 100, 1_000_000_000])
TOKEN_RATES = st.sampled_from([100, 70, 250, None, 1_000_000_000])
SCOPES = ("", "k:key-1", "m:chat")
NEWEST_FIRST = st.integers(0, 5)  # which request: 0 the newest; beyond the oldest: one that there never was
Answer = TypeVar("Answer")


class LimitsMachine(RuleBasedStateMachine):
    """Drives the store and the twin with the same calls at the same times."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        infra.flush_redis(self.url)
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.redis = open_redis(self.url)
        self.admission = RedisAdmission(self.redis, clock=self.clock)
        self.use = twin.TenantUse()
        self.limits = Limits()
        self.also: tuple[twin.ScopedLimits, ...] = ()
        self.requests: list[RequestId] = []
        record = KeyRecord(CALLER.key_id, ACME, CALLER.key_hash, CALLER.scopes, "", self.clock.now_ms(), 0)
        self.run(RedisKeyRegistry(self.redis).add(record))

    def run(self, call: Awaitable[Answer]) -> Answer:
        """One call on the machine's own loop."""

        async def waited() -> Answer:
            return await call

        return self.runner.run(waited())

    def teardown(self) -> None:
        """Close what was opened."""
        self.run(self.redis.aclose())
        self.runner.close()

    @initialize(requests=st.sampled_from([None, 7, 60]), tokens=TOKEN_RATES)
    def first_limits(self, requests: int | None, tokens: int | None) -> None:
        """Most tenants have limits that let something through."""
        self.limits = Limits(requests_per_minute=requests, tokens_per_minute=tokens)

    @rule(requests=RATES, tokens=RATES | TOKEN_RATES, concurrent=st.none() | st.integers(0, 3))
    def set_limits(self, requests: int | None, tokens: int | None, concurrent: int | None) -> None:
        """The catalogue changes."""
        self.limits = Limits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=concurrent)

    @rule(
        key=st.none() | st.tuples(RATES, TOKEN_RATES, st.none() | st.integers(0, 3)),
        model=st.none() | st.tuples(st.just(None), TOKEN_RATES, st.none() | st.integers(0, 3)),
    )
    def set_limits_of_key_and_model(self, key: Any, model: Any) -> None:
        """Another key calls, or another model, with limits of its own or none."""
        wanted = (("k:key-1", key), ("m:chat", model))
        self.also = tuple(twin.ScopedLimits(scope, *values) for scope, values in wanted if values is not None)

    @rule(duration_ms=st.sampled_from([1, 7, 999, 8_571, 30_000, 60_000]) | st.integers(1, 70_000))
    def wait(self, duration_ms: int) -> None:
        """Time passes."""
        self.clock.advance(duration_ms)

    def chosen(self, number: int) -> RequestId:
        """An earlier request, ended or not, or one that there never was."""
        known = list(reversed(self.requests))
        return known[number] if number < len(known) else RequestId("never")

    @rule(tokens=st.integers(0, 120))
    def admit(self, tokens: int) -> None:
        """A new request gets the same answer."""
        self.requests.append(RequestId(f"r{len(self.requests)}"))
        self._admit_both(self.requests[-1], tokens)

    @rule(number=NEWEST_FIRST, tokens=st.integers(0, 120))
    def admit_again(self, number: int, tokens: int) -> None:
        """A repeated call, or one that arrives after its end, gets the same answer."""
        self._admit_both(self.chosen(number), tokens)

    def _admit_both(self, request_id: RequestId, tokens: int) -> None:
        ask = twin.Ask(
            request_id,
            tokens,
            self.limits.requests_per_minute,
            self.limits.tokens_per_minute,
            self.limits.concurrent_requests,
            self.also,
        )
        self.use, expected = twin.admit(self.use, ask, self.clock.now_ms())
        actual = self._admit(request_id, tokens)
        match expected:
            case twin.Taken(room):
                assert isinstance(actual, Admitted)
                assert room == twin.Room(
                    actual.remaining_requests,
                    actual.remaining_tokens,
                    actual.reset_requests_ms,
                    actual.reset_tokens_ms,
                    actual.requests_limit,
                    actual.tokens_limit,
                )
            case twin.Refused(limit, wait_ms, scope):
                assert isinstance(actual, LimitExceeded)
                assert actual.retry_after_ms == wait_ms
                assert {"requests_per_minute": "requests a", "tokens_per_minute": "tokens a"}.get(
                    limit.value, "at once"
                ) in actual.message
                assert {"": "", "k:": "of this key", "m:": "of this model"}[scope[:2]] in actual.message
            case twin.Ended():
                assert isinstance(actual, Conflict)

    def _admit(self, request_id: RequestId, tokens: int) -> Admitted | LimitExceeded | Conflict:
        try:
            return self.run(
                self.admission.admit(
                    CALLER, request_id, self.limits, input_tokens=0, reserve_tokens=tokens, also=self.also
                )
            )
        except (LimitExceeded, Conflict) as error:
            return error

    @rule(number=NEWEST_FIRST, used=st.integers(0, 150))
    def settle(self, number: int, used: int) -> None:
        """Also of requests that are not there."""
        request_id = self.chosen(number)
        self.use = twin.settle(self.use, request_id, used, self.clock.now_ms())
        self.run(self.admission.settle(held(request_id), used_tokens=used))

    @rule(number=NEWEST_FIRST)
    def withdraw(self, number: int) -> None:
        """Also before the admission."""
        request_id = self.chosen(number)
        self.use = twin.withdraw(self.use, request_id, self.clock.now_ms())
        self.run(self.admission.withdraw(ACME, request_id))

    @rule(numbers=st.lists(NEWEST_FIRST, unique=True, max_size=6))
    def renew(self, numbers: list[int]) -> None:
        """Many at once."""
        requests = [self.chosen(number) for number in numbers]
        for request_id in requests:
            self.use = twin.renew(self.use, request_id, self.clock.now_ms())
        self.run(self.admission.renew([held(request_id) for request_id in requests]))

    @invariant()
    def same_state(self) -> None:
        """Meters and running leases of every scope are equal, to the point."""
        now_ms = self.clock.now_ms()
        for scope in SCOPES:
            expected = self.use.of(scope)
            meters, leases = self.run(self._stored(scope))
            assert meters == (expected.requests.points, expected.tokens.points)
            assert leases == {name: end for name, end in expected.leases.items() if end > now_ms}

    async def _stored(self, scope: str) -> tuple[tuple[int, int], dict[str, int]]:
        redis: Any = self.redis
        points = await redis.hmget(redis_names.meters(ACME, scope), ["requests", "tokens"])
        leases = await redis.zrange(redis_names.concurrency_leases(ACME, scope), 0, -1, withscores=True)
        now_ms = self.clock.now_ms()
        return (
            (int(points[0] or 0), int(points[1] or 0)),
            {name.decode(): int(end) for name, end in leases if end > now_ms},
        )


def held(request_id: RequestId) -> Admitted:
    """What settle and renew need of an admission."""
    return Admitted(request_id, ACME, 0, None, None, 0, 0)


@pytest.mark.timeout(300)
def test_the_scripts_and_the_twin_decide_alike(redis_url: str) -> None:
    """Invariants 13 and 15, B09, B10, B12: on a real store, after every step, over sequences of calls and waits."""
    LimitsMachine.url = redis_url
    run_state_machine_as_test(
        LimitsMachine,
        settings=settings(
            max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )

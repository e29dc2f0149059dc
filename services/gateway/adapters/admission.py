"""Limits in Redis: one script admits or refuses, one settles, one renews. The scripts lie beside this file.

The store's clock counts, not the gateway's: replicas with different clocks see one limit. An admission whose caller was
cancelled, or whose answer was lost, is withdrawn: it may have happened, or may still happen after the caller left, and
must not be counted (invariant 15, case B37). Decision: docs/decisions/0082-admission.md.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog
from redis.asyncio import Redis

from roundhouse.budgets import budget_key, spent_field
from roundhouse.catalogue.records import Limits
from roundhouse.clock import Clock
from roundhouse.errors import BudgetExhausted, Conflict, LimitExceeded, RoundhouseError, Unauthenticated, Unavailable
from roundhouse.redis_edge import LuaScript
from roundhouse.settlements import ENTRIES_MAX, KEEP_MS, settlements_key
from roundhouse.vocabulary import RequestId, TenantId
from services.gateway.adapters import redis_names
from services.gateway.domain.budgets import SETTLED_HOLD_MS, Money
from services.gateway.domain.limits import CONCURRENCY_RETRY_MS, LEASE_MS, LimitName, ScopedLimits
from services.gateway.ports import NO_COSTS, Admitted, Caller

log = structlog.get_logger(__name__)

TICKET_MS = 600_000  # a guess: outlives every pause of a gateway after which settling still matters
ENDED_MS = 60_000  # longer than any call can still be on its way to the store (CALL_TIMEOUT_S and proxies)
WITHDRAW_TIMEOUT_S = 5.0

_PACKAGE = "services.gateway.adapters"
_admit = LuaScript(_PACKAGE, "admission.lua", prelude=("budget.lua",))
_settle = LuaScript(_PACKAGE, "settle.lua", prelude=("budget.lua",), patient=True)
_renew = LuaScript(_PACKAGE, "renew.lua")

_LIMIT_TEXT = {
    LimitName.REQUESTS: "requests a minute",
    LimitName.TOKENS: "tokens a minute",
    LimitName.CONCURRENT: "requests at once",
}


class RedisAdmission:
    """`Admission` in Valkey or Redis. `clock` replaces the store's own; only tests move time."""

    def __init__(self, redis: Redis, *, clock: Clock | None = None) -> None:
        self._redis = redis
        self._clock = clock
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def admit(
        self,
        caller: Caller,
        request_id: RequestId,
        limits: Limits,
        *,
        input_tokens: int,
        reserve_tokens: int,
        also: Sequence[ScopedLimits] = (),
        money: Sequence[Money] = (),
    ) -> Admitted:
        """See `Admission.admit`. A cancelled call leaves nothing counted once the withdrawal has run."""
        assert 0 <= input_tokens <= reserve_tokens, "the reservation includes the prompt"
        tenant_id = caller.tenant_id
        scopes = all_scopes(limits, also, money)
        asked_of = {each.scope: _budget_text(each) for each in money}
        keys = [
            redis_names.alive_keys(tenant_id),
            redis_names.ticket(tenant_id, request_id),
            settlements_key(tenant_id),
        ]
        asked: list[str | int] = [caller.key_hash, caller.expires_ms, request_id, reserve_tokens]
        asked += [LEASE_MS, TICKET_MS, CONCURRENCY_RETRY_MS, self._now(), ENTRIES_MAX]
        for one in scopes:
            keys += [redis_names.meters(tenant_id, one.scope), redis_names.concurrency_leases(tenant_id, one.scope)]
            keys.append(budget_key(tenant_id, one.scope))
            asked += [one.scope, _or_none(one.requests_per_minute), _or_none(one.tokens_per_minute)]
            asked += [_or_none(one.concurrent_requests), asked_of.get(one.scope, "")]
        try:
            answer = await _admit(self._redis, keys, asked)
        except (asyncio.CancelledError, Unavailable):
            self._withdraw_soon(tenant_id, request_id)
            raise
        if answer[0] == b"budget":
            refusing = next(each for each in money if each.scope == scopes[answer[3]].scope)
            raise budget_exhausted(refusing, int(answer[1]), int(answer[2]))
        return _admitted(answer, tenant_id, request_id, scopes, reserve_tokens)

    async def settle(self, admitted: Admitted, *, used_tokens: int, costs: Mapping[str, int] = NO_COSTS) -> None:
        """See `Admission.settle`."""
        await self._end(admitted.tenant_id, admitted.ticket, used_tokens, costs, withdraw=False)

    async def withdraw(self, tenant_id: TenantId, request_id: RequestId) -> None:
        """Undo an admission entirely, the request count too, even one still on its way. Idempotent.

        Raises Unavailable."""
        await self._end(tenant_id, request_id, 0, NO_COSTS, withdraw=True)

    async def renew(self, held: Sequence[Admitted]) -> None:
        """See `Admission.renew`. One round trip; each tenant's leases are renewed atomically."""
        by_tenant: dict[TenantId, list[RequestId]] = defaultdict(list)
        for admitted in held:
            by_tenant[admitted.tenant_id].append(admitted.ticket)
        if not by_tenant:
            return
        calls = []
        for tenant_id, requests in by_tenant.items():
            tickets = [redis_names.ticket(tenant_id, request_id) for request_id in requests]
            keys = [redis_names.concurrency_leases(tenant_id), budget_key(tenant_id), *tickets]
            calls.append((keys, [LEASE_MS, TICKET_MS, self._now(), *requests]))
        await _renew.each(self._redis, calls)

    async def aclose(self) -> None:
        """Wait (bounded) for withdrawals that are still running."""
        if self._withdrawals:
            await asyncio.wait(set(self._withdrawals), timeout=WITHDRAW_TIMEOUT_S)

    async def _end(
        self, tenant_id: TenantId, request_id: RequestId, used_tokens: int, costs: Mapping[str, int], *, withdraw: bool
    ) -> None:
        keys = [
            redis_names.meters(tenant_id),
            redis_names.concurrency_leases(tenant_id),
            redis_names.ticket(tenant_id, request_id),
            budget_key(tenant_id),
            settlements_key(tenant_id),
        ]
        spent = " ".join(f"{scope or '-'} {cost}" for scope, cost in costs.items())
        times = [ENDED_MS, self._now(), spent, SETTLED_HOLD_MS, ENTRIES_MAX, KEEP_MS]
        await _settle(self._redis, keys, [request_id, used_tokens, int(withdraw), *times])

    def _withdraw_soon(self, tenant_id: TenantId, request_id: RequestId) -> None:
        task = asyncio.create_task(self._withdraw_once(tenant_id, request_id), name="admission_withdrawal")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _withdraw_once(self, tenant_id: TenantId, request_id: RequestId) -> None:
        # Once: if the store is still away, the lease runs out by itself and the tokens drain within the minute.
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self.withdraw(tenant_id, request_id)

    def _now(self) -> str | int:
        return "" if self._clock is None else self._clock.now_ms()


def _or_none(limit: int | None) -> int:
    return -1 if limit is None else limit


def all_scopes(limits: Limits, also: Sequence[ScopedLimits], money: Sequence[Money]) -> tuple[ScopedLimits, ...]:
    """Every scope of a request, the tenant's first: those with limits, then those with nothing but a budget."""
    scopes = (_own(limits), *also)
    known = {one.scope for one in scopes}
    return (*scopes, *(ScopedLimits(each.scope) for each in money if each.scope not in known)) if money else scopes


def _budget_text(money: Money) -> str:
    return f"{money.limit_micro} {money.cost_micro} {spent_field(money.period, money.budget.currency)}"


def budget_exhausted(money: Money, spent_micro: int, reserved_micro: int) -> BudgetExhausted:
    """The refusal as callers see it. Amounts are the tenant's own."""
    budget = money.budget
    left = max(0, money.limit_micro - spent_micro - reserved_micro)
    what = f"the budget of {budget.amount} {budget.currency} for the {budget.period} {money.period}"
    what += _WHOSE[money.scope[:2]]
    if left == 0:
        held = " (with what running requests may cost)" if spent_micro < money.limit_micro else ""
        return BudgetExhausted(f"{what} is spent{held}")
    return BudgetExhausted(
        f"{what} has {_decimal(left)} left, and this request may cost up to {_decimal(money.cost_micro)}:"
        " allow fewer output tokens, or raise the budget"
    )


def _decimal(micro: int) -> str:
    return f"{micro // 1_000_000}.{micro % 1_000_000:06d}".rstrip("0").rstrip(".")


def _own(limits: Limits) -> ScopedLimits:
    return ScopedLimits("", limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)


def _admitted(
    answer: list[Any],
    tenant_id: TenantId,
    request_id: RequestId,
    scopes: Sequence[ScopedLimits],
    reserve_tokens: int,
) -> Admitted:
    if answer[0] != b"taken":
        raise _refusal(answer, scopes)
    _, requests_limit, left_requests, reset_requests_ms, tokens_limit, left_tokens, reset_tokens_ms = answer
    return Admitted(
        ticket=request_id,
        tenant_id=tenant_id,
        reserved_tokens=reserve_tokens,
        remaining_requests=None if requests_limit < 0 else left_requests,
        remaining_tokens=None if tokens_limit < 0 else left_tokens,
        reset_requests_ms=reset_requests_ms,
        reset_tokens_ms=reset_tokens_ms,
        requests_limit=None if requests_limit < 0 else requests_limit,
        tokens_limit=None if tokens_limit < 0 else tokens_limit,
    )


def _refusal(answer: list[Any], scopes: Sequence[ScopedLimits]) -> RoundhouseError:
    match answer[0]:
        case b"key":
            return Unauthenticated("the API key is not valid")
        case b"ended":
            return Conflict("this request id was used before")
        case b"refused":
            return limit_exceeded(LimitName(answer[1].decode()), answer[2], scopes[answer[3]])
    raise AssertionError(f"admission.lua answered {answer[0]!r}")


def limit_exceeded(limit: LimitName, wait_ms: int, limits: ScopedLimits) -> LimitExceeded:
    """The refusal as callers see it; `wait_ms` below 0 means that waiting does not help."""
    whose = _WHOSE[limits.scope[:2]]
    value = getattr(limits, limit.value)
    if wait_ms < 0:
        return LimitExceeded(f"this request alone is more than the limit of {value} {_LIMIT_TEXT[limit]}{whose}")
    return LimitExceeded(f"the limit of {value} {_LIMIT_TEXT[limit]}{whose} is reached", retry_after_ms=wait_ms)


_WHOSE = {"": "", "k:": " of this key", "m:": " of this model"}

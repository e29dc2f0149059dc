"""`BudgetStore` in Valkey or Redis: what gateways read when they admit a request."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse.budgets import KEY_SCOPES, KNOWN, budget_key, micro_up, spent_field
from roundhouse.errors import Unavailable
from roundhouse.redis_edge import LuaScript, ScriptCall
from services.metering.ports import TenantSpend

KEEP_MS: Final = 70 * 24 * 3_600_000  # longer than two months: a tenant that is idle all month has spent nothing in it
_write = LuaScript("services.metering.adapters", "budget_spent.lua")


class RedisBudgets:
    """See `ports.BudgetStore`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def write(self, spends: Sequence[TenantSpend]) -> None:
        """See `BudgetStore.write`. One round trip."""
        await _write.each(self._redis, [_call(spend) for spend in spends])

    async def key_scopes(self) -> Mapping[str, tuple[str, str]]:
        """See `BudgetStore.key_scopes`."""
        try:
            found = await cast("Awaitable[dict[bytes, bytes]]", self._redis.hgetall(KEY_SCOPES))
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("the store of budgets does not answer") from error
        pairs = ((key_id.decode(), told.decode().partition(" ")) for key_id, told in found.items())
        return {key_id: (tenant_id, scope) for key_id, (tenant_id, _, scope) in pairs}

    async def known(self) -> int | None:
        """See `BudgetStore.known`."""
        try:
            text = await self._redis.get(KNOWN)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("the store of budgets does not answer") from error
        return int(text) if text is not None else None

    async def remember(self, sequence: int) -> None:
        """See `BudgetStore.remember`."""
        try:
            await self._redis.set(KNOWN, sequence)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("the store of budgets does not answer") from error


def _call(spend: TenantSpend) -> ScriptCall:
    arguments: list[str | int] = [spend.sequence, KEEP_MS, len(spend.sums)]
    for (period, currency), amount in sorted(spend.sums.items()):
        arguments += [spent_field(period, currency), max(0, micro_up(amount))]
    for sequence, request_id in spend.counted:
        arguments += [sequence, request_id]
    return [budget_key(spend.tenant_id, spend.scope)], cast("list[str | bytes | int | float]", arguments)

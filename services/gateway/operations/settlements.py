"""Settling admissions, also when the store is away for a while.

A settlement that fails is kept and tried again by `retry`, which the heartbeat calls. If too many pile up the oldest is
dropped: its concurrency lease and its reservation then end by themselves in the store.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import structlog

from roundhouse.errors import Unavailable
from services.gateway.ports import NO_COSTS, Admission, Admitted

log = structlog.get_logger(__name__)

WAITING_MAX = 10_000  # a guess: half a minute of a busy gateway
SETTLE_TIMEOUT_S = 3.0  # above the store's own call timeout


class Used(NamedTuple):
    """What a request consumed over all attempts."""

    tokens: int
    costs: Mapping[str, int]  # micro-units of money by scope, at most; only of scopes with a budget


class Settlements:
    """Settles each admission once, sooner or later."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._waiting: deque[tuple[Admitted, Used | None]] = deque(maxlen=WAITING_MAX)

    def __len__(self) -> int:
        return len(self._waiting)

    async def settle(self, admitted: Admitted, *, used_tokens: int, costs: Mapping[str, int] = NO_COSTS) -> None:
        """Settle now, or keep it for `retry`. Bounded by `SETTLE_TIMEOUT_S`; never raises for a store that is away."""
        await self._now_or_later(admitted, Used(used_tokens, costs))

    async def withdraw(self, admitted: Admitted) -> None:
        """Undo the admission of a request that was refused after it; bounded and kept as `settle`."""
        await self._now_or_later(admitted, None)

    async def retry(self) -> None:
        """Settle what was kept, oldest first. Raises Unavailable at the first failure and keeps the rest."""
        while self._waiting:
            first = self._waiting[0]
            await self._end(*first)
            if self._waiting and self._waiting[0] is first:  # else it was pushed out meanwhile
                self._waiting.popleft()

    async def _now_or_later(self, admitted: Admitted, used: Used | None) -> None:
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._end(admitted, used)
        except (Unavailable, TimeoutError):
            log.warning("settlement_delayed", request_id=admitted.ticket, tenant_id=admitted.tenant_id)
            self._waiting.append((admitted, used))

    async def _end(self, admitted: Admitted, used: Used | None) -> None:
        if used is None:
            await self._admission.withdraw(admitted.tenant_id, admitted.ticket)
        else:
            await self._admission.settle(admitted, used_tokens=used.tokens, costs=used.costs)

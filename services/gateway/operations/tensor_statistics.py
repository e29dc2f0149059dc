"""What KServe's statistics say: the calls of a tenant's models through this process, since it started.

Each gateway counts for itself, as each server does behind any load balancer; bills come from metering, not from here.
Bounded by the catalogue and its tenants: only calls of models that were visible are counted (invariant 17).
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roundhouse.vocabulary import TenantId
from services.gateway.operations.accounting import Work
from services.gateway.operations.run import Run
from services.gateway.operations.run_request import RequestParts, run_request

ENTRIES_MAX = 10_000  # a guess: pairs of tenant and model; the least recently called is forgotten first


@dataclass(slots=True)
class Calls:
    """Counts of one model for one tenant; times in nanoseconds, as the protocol has them."""

    succeeded: int = 0
    succeeded_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    last_ms: int = 0  # Unix time


class TensorStatistics:
    """See the module."""

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[TenantId, str], Calls] = OrderedDict()

    @asynccontextmanager
    async def counted(self, parts: RequestParts, work: Work) -> AsyncIterator[Run]:
        """`run_request`, counted: a success once everything was produced, whenever the client then leaves."""
        began_ms, succeeded = parts.clock.monotonic_ms(), False
        try:
            async with run_request(parts, work) as run:
                try:
                    yield run
                finally:
                    succeeded = run.is_done
        finally:
            took_ms = parts.clock.monotonic_ms() - began_ms
            tenant_id, now_ms = work.caller.tenant_id, parts.clock.now_ms()
            self.count(tenant_id, work.name, succeeded=succeeded, took_ms=took_ms, now_ms=now_ms)

    def count(self, tenant_id: TenantId, model: str, *, succeeded: bool, took_ms: int, now_ms: int) -> None:
        """One call has ended."""
        calls = self._calls.setdefault((tenant_id, model), Calls())
        self._calls.move_to_end((tenant_id, model))
        if len(self._calls) > ENTRIES_MAX:
            self._calls.popitem(last=False)
        if succeeded:
            calls.succeeded += 1
            calls.succeeded_ns += took_ms * 1_000_000
        else:
            calls.failed += 1
            calls.failed_ns += took_ms * 1_000_000
        calls.last_ms = now_ms

    def of(self, tenant_id: TenantId, model: str) -> Calls:
        """What was counted; zeros for a model that was never called."""
        return self._calls.get((tenant_id, model), Calls())

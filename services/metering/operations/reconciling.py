"""Reads the books for a window and compares them; hourly for every five minutes since the last time, or when asked.

Reads only. Several processes share the hourly work by a mark in the store. Differences are logged with their request
and counted; nothing is corrected by itself.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

import structlog

from roundhouse.clock import Clock
from services.metering.domain.queries import UsageFilter
from services.metering.domain.rating import money_text
from services.metering.domain.reconciling import Comparison, Difference, Evidence, Recorded, RequestKey, compare
from services.metering.ports import Ledger, ReconcilingObserver, ReconcilingSources

log = structlog.get_logger(__name__)

LOOK_MS: Final = 60_000
EVERY_MS: Final = 3_600_000
SLICE_MS: Final = 300_000  # bounds the memory: five minutes of a busy cluster
MARGIN_MS: Final = 120_000  # how far the entries of one request can lie apart: a lease, and a gateway that starts again
GRACE_MS: Final = 60_000  # until an entry may still be on its way; far above what the books need when all is well
PAGE_ROWS: Final = 1_000
LOGGED_MAX: Final = 100  # differences of one slice


class Reconciler:
    """See the module. Every method raises Unavailable while a book cannot be read."""

    def __init__(
        self, ledger: Ledger, sources: ReconcilingSources, observer: ReconcilingObserver, clock: Clock
    ) -> None:
        self._ledger = ledger
        self._sources = sources
        self._observer = observer
        self._clock = clock
        self._reading = asyncio.Lock()  # one window at a time: the memory is bounded

    async def turn(self) -> None:
        """For `Lifecycle.every`: once an hour has passed since the last comparison, compare what came meanwhile."""
        until_ms = self._clock.now_ms() - GRACE_MS
        from_ms = await self._sources.begin(until_ms, every_ms=EVERY_MS)
        if from_ms is None:
            return
        comparison = await self.between(from_ms, until_ms)
        await self._sources.done(until_ms)
        self._observer.reconciled(until_ms, Counter(each.kind for each in comparison.differences))

    async def between(self, from_ms: int, to_ms: int) -> Comparison:
        """Compare a window, slice by slice."""
        checked: Counter[str] = Counter()
        differences: list[Difference] = []
        for start_ms in range(from_ms, max(to_ms, from_ms + 1), SLICE_MS):
            async with self._reading:
                part = await self._slice(start_ms, min(start_ms + SLICE_MS, to_ms))
            checked.update(part.checked)
            differences += part.differences
            for each in part.differences[:LOGGED_MAX]:
                log.error(
                    "usage_difference",
                    kind=each.kind.value,
                    request_id=each.request_id,
                    tenant_id=each.tenant_id,
                    detail=each.detail,
                )
        return Comparison(from_ms, to_ms, dict(checked), differences)

    async def _slice(self, from_ms: int, to_ms: int) -> Comparison:
        wide = (from_ms - MARGIN_MS, to_ms + MARGIN_MS)
        published = (await self._ledger.reconcile(UsageFilter(from_ms=0, to_ms=0))).published_sequence
        recorded = await self._rows(*wide)
        emitted = await self._sources.emitted(*wide)
        billed = await self._sources.billed(*wide)
        tenants = {each.key.tenant_id for each in recorded} | {each.key.tenant_id for each in emitted}
        settlements = await self._sources.settlements(tenants, *wide)
        elsewhere = {each.key.tenant_id for book in (billed, settlements) for each in book}
        erased = await self._ledger.erased(tenants | elsewhere)
        return compare(Evidence(settlements, emitted, recorded, billed, published, erased), from_ms, to_ms)

    async def _rows(self, from_ms: int, to_ms: int) -> Sequence[Recorded]:
        rows: list[Recorded] = []
        after: int | None = None
        while True:
            page = await self._ledger.rows(UsageFilter(from_ms=from_ms, to_ms=to_ms), after=after, limit=PAGE_ROWS)
            rows += [
                Recorded(
                    RequestKey(row.facts.tenant_id, row.facts.request_id),
                    row.facts.event_id,
                    row.sequence,
                    row.facts.input_tokens,
                    row.facts.output_tokens,
                    money_text(row.rating.amount),
                    row.facts.time_ms,
                )
                for row in page.rows
            ]
            after = page.next_after
            if after is None:
                return rows

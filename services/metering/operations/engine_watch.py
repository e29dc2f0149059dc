"""Samples the engines' counters each minute and compares their growth with the ledger: hourly, and when asked."""

from collections.abc import Sequence
from typing import Final

import structlog

from roundhouse.clock import Clock
from services.metering.domain.engine_books import EngineLine, Growth
from services.metering.domain.queries import Dimension, UsageFilter
from services.metering.domain.reconciling import Kind
from services.metering.ports import EngineCounters, Ledger, ReconcilingObserver

log = structlog.get_logger(__name__)

SAMPLE_MS: Final = 60_000  # what a model counted in the last minute before it is unloaded may be missed
EVERY_MS: Final = 3_600_000
MODELS_PAGE: Final = 1_000


class EngineWatch:
    """See the module. Each metering process watches for itself, from its start."""

    def __init__(self, counters: EngineCounters, ledger: Ledger, observer: ReconcilingObserver, clock: Clock) -> None:
        self._counters = counters
        self._ledger = ledger
        self._observer = observer
        self._clock = clock
        self._growth = Growth()
        self._since_ms = 0

    async def turn(self) -> None:
        """For `Lifecycle.every`. Raises Unavailable."""
        lines = await self.so_far()
        if self._clock.now_ms() - self._since_ms < EVERY_MS:
            return
        for line in lines:
            if line.differs:
                log.error("usage_difference", kind=Kind.ENGINE_DIFFERS.value, detail=line.difference().detail)
        self._observer.engines_compared(sum(line.differs for line in lines))
        self._growth, self._since_ms = Growth(last=self._growth.last), self._clock.now_ms()

    async def so_far(self) -> Sequence[EngineLine]:
        """Sample, and compare the window so far. Raises Unavailable."""
        if self._growth.last is None:
            self._since_ms = self._clock.now_ms()
        self._growth.add(await self._counters.read())
        ledger: list[tuple[str, tuple[int, int]]] = []
        where, after = UsageFilter(from_ms=self._since_ms), None
        while True:
            page = await self._ledger.groups(where, (Dimension.MODEL,), after=after, limit=MODELS_PAGE)
            ledger += [
                (str(group.key[0]), (group.totals.input_tokens, group.totals.output_tokens)) for group in page.groups
            ]
            after = page.next_after
            if after is None:
                return self._growth.against(_summed(ledger))


def _summed(groups: Sequence[tuple[str, tuple[int, int]]]) -> list[tuple[str, tuple[int, int]]]:
    """Groups of one model in several currencies are one."""
    sums: dict[str, tuple[int, int]] = {}
    for model, (more_input, more_output) in groups:
        known = sums.get(model, (0, 0))
        sums[model] = (known[0] + more_input, known[1] + more_output)
    return list(sums.items())

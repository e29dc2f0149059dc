"""`Instruments` that only count, for tests that look at numbers."""

from collections import Counter

from roundhouse.vocabulary import PoolName
from services.scheduler.domain.records import PoolState, Ticket
from services.scheduler.domain.warmth.autoscale import PoolSignal


class CountingInstruments:
    """Counts by kind and label."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.signals: dict[PoolName, PoolSignal] = {}

    def refused(self, pool: PoolName, reason: str) -> None:
        self.counts[f"refused {reason}"] += 1

    def granted(self, pool: PoolName, ticket: Ticket) -> None:
        self.counts["granted"] += 1

    def ended(self, pool: PoolName, outcome: str) -> None:
        self.counts[f"ended {outcome}"] += 1

    def load_ended(self, pool: PoolName, model: str, outcome: str) -> None:
        self.counts[f"load {outcome}"] += 1

    def observed(self, pool: PoolName, state: PoolState) -> None:
        self.counts["observed"] += 1

    def planned(self, pool: PoolName, signal: PoolSignal) -> None:
        self.signals[pool] = signal

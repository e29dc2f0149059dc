"""`Instruments` that only count, for tests that look at numbers."""

from collections import Counter
from collections.abc import Mapping

from roundhouse.vocabulary import PoolName
from services.scheduler.domain.plans import Wait
from services.scheduler.domain.records import PoolState, Ticket
from services.scheduler.domain.warmth.autoscale import PoolSignal


class CountingInstruments:
    """Counts by kind and label."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.waits: dict[PoolName, dict[Wait, int]] = {}
        self.signals: dict[PoolName, PoolSignal] = {}

    def refused(self, pool: PoolName, reason: str) -> None:
        self.counts[f"refused {reason}"] += 1

    def granted(self, pool: PoolName, ticket: Ticket) -> None:
        self.counts["granted"] += 1

    def ended(self, pool: PoolName, outcome: str) -> None:
        self.counts[f"ended {outcome}"] += 1

    def load_ended(self, pool: PoolName, model: str, outcome: str) -> None:
        self.counts[f"load {outcome}"] += 1

    def waiting(self, pool: PoolName, requests: Mapping[Wait, int]) -> None:
        self.waits[pool] = dict(requests)

    def observed(self, pool: PoolName, state: PoolState) -> None:
        self.counts["observed"] += 1

    def planned(self, pool: PoolName, signal: PoolSignal) -> None:
        self.signals[pool] = signal

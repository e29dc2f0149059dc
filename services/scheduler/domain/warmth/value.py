"""Our eviction: waiting saved per byte-second, from the forecast and the cost to load again.

worth = arrivals served warm per second of the place (`GapLaw.worth_per_ms`) × ms to load again / bytes. The forecast
already counts an arrival once, not every request of a burst: a burst waits for one load.
"""

from dataclasses import dataclass, field

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.eviction import MIB, Candidate, Use
from services.scheduler.domain.warmth.forecast import Forecaster

FRESH_SHARE = 0.02  # a worth is kept while the idle time has grown by less than this share: within the bins' width
FRESH_LEAST_MS = 1_000


@dataclass(slots=True)
class ExpectedValue:
    """Ours. Shares the forecaster with keep-alive and the plan; whoever owns that records the arrivals there."""

    forecaster: Forecaster
    name: str = "value"
    kept: dict[VersionKey, tuple[int, int, float]] = field(default_factory=dict)  # last use, fresh until, worth

    def record(self, use: Use) -> None:
        """See `EvictionPolicy`."""
        self.forecaster.record(use.version, use.at_ms)

    def evicted(self, candidate: Candidate, now_ms: int) -> None:
        """See `EvictionPolicy`."""
        self.kept.pop(candidate.version, None)

    def worth(self, candidate: Candidate, now_ms: int) -> float:
        """See `EvictionPolicy`. ms of waiting saved per MiB and ms."""
        return self._rate(candidate.version, now_ms) * candidate.reload_ms * MIB / candidate.bytes

    def explain(self, candidate: Candidate, now_ms: int) -> str:
        """See `EvictionPolicy`."""
        found = self.forecaster.explain(candidate.version, now_ms)
        if found is None:
            return "never wanted"
        price = self.worth(candidate, now_ms) * 1000
        return f"{found.text}; saves {price:.3g} ms of waiting per MiB and second"

    def _rate(self, version: VersionKey, now_ms: int) -> float:
        model = self.forecaster.models.get(version)
        if model is None:
            return 0.0
        last_ms, until_ms, rate = self.kept.get(version, (-1, 0, 0.0))
        if last_ms == model.last_ms and now_ms < until_ms:
            return rate
        rate = self.forecaster.worth_per_ms(version, now_ms)
        fresh_ms = max(FRESH_LEAST_MS, int(FRESH_SHARE * (now_ms - model.last_ms)))
        self.kept[version] = (model.last_ms, now_ms + fresh_ms, rate)
        return rate

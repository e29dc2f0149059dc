"""How long an idle model stays in memory, and when it is put back before it is wanted.

A policy answers with windows of idle time during which the model is warm: the first begins at 0 for keep-alive, a later
one is a pre-warm. Ours holds a model while the waiting that a warm place is expected to save is worth its memory: the
hazard of an arrival × ms to load again / bytes, against the price of memory. The price is what the pool's marginal
place is worth now, so a forecast never takes room from something more valuable: where all fits it is next to nothing.

`HybridHistogram` is the policy of Shahrad et al. (ATC 2020, section 4.2). Its ARIMA, for gaps beyond the histogram, is
replaced here by the mean of those gaps; the paper's margins around the prediction are kept.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.forecast import Forecaster

MINUTE_MS = 60_000
RANGE_MINUTES = 240  # Shahrad: histograms of 4 hours in bins of a minute
HEAD, TAIL = 0.05, 0.99  # Shahrad: percentiles that give the pre-warm window and the end of the keep-alive
MARGIN = 0.10  # Shahrad: both are moved out by a tenth
SPREAD_LEAST = 2.0  # Shahrad: a histogram whose bin counts vary less than this (CV) says nothing
BEYOND_MARGIN = 0.15  # Shahrad: around the time-series prediction


@dataclass(frozen=True, slots=True)
class Window:
    """Idle time, in ms since the last arrival, during which a model is warm."""

    from_ms: float
    to_ms: float


class KeepAlivePolicy(Protocol):
    """Says when an idle model is warm."""

    def record(self, version: VersionKey, at_ms: int) -> None:
        """An arrival."""
        ...

    def windows(self, version: VersionKey) -> tuple[Window, ...]:
        """For the idle time that began with the last arrival; in order, apart."""
        ...


@dataclass(frozen=True, slots=True)
class FixedKeepAlive:
    """The same for every model."""

    keep_ms: int

    def record(self, version: VersionKey, at_ms: int) -> None:
        """See `KeepAlivePolicy`."""

    def windows(self, version: VersionKey) -> tuple[Window, ...]:
        """See `KeepAlivePolicy`."""
        return (Window(0, self.keep_ms),)


@dataclass(slots=True)
class IdleHistogram:
    """One model's idle times by the minute, with what is needed for the spread of the bin counts in O(1)."""

    last_ms: int
    bins: list[int] = field(default_factory=lambda: [0] * RANGE_MINUTES)
    inside: int = 0
    squares: int = 0  # sum of the squared bin counts
    beyond: int = 0
    beyond_ms: int = 0

    def add(self, gap_ms: int) -> None:
        """Count one idle time."""
        minute = gap_ms // MINUTE_MS
        if minute >= RANGE_MINUTES:
            self.beyond += 1
            self.beyond_ms += gap_ms
            return
        self.squares += 2 * self.bins[minute] + 1
        self.bins[minute] += 1
        self.inside += 1

    @property
    def spread(self) -> float:
        """Coefficient of variation of the bin counts; 0 without any."""
        if not self.inside:
            return 0.0
        mean = self.inside / RANGE_MINUTES
        return math.sqrt(max(0.0, self.squares / RANGE_MINUTES - mean * mean)) / mean

    def percentile(self, share: float) -> int:
        """The minute in which this share of the idle times has ended."""
        wanted, seen = share * self.inside, 0
        for minute, count in enumerate(self.bins):
            seen += count
            if seen >= wanted:
                return minute
        return RANGE_MINUTES - 1


@dataclass(slots=True)
class HybridHistogram:
    """Shahrad's policy, for comparison."""

    models: dict[VersionKey, IdleHistogram] = field(default_factory=dict)

    def record(self, version: VersionKey, at_ms: int) -> None:
        """See `KeepAlivePolicy`."""
        model = self.models.get(version)
        if model is None:
            self.models[version] = IdleHistogram(at_ms)
            return
        model.add(at_ms - model.last_ms)
        model.last_ms = at_ms

    def windows(self, version: VersionKey) -> tuple[Window, ...]:
        """See `KeepAlivePolicy`."""
        model = self.models.get(version)
        if model is not None and model.beyond > model.inside:
            mean_ms = model.beyond_ms / model.beyond
            return (Window(mean_ms * (1 - BEYOND_MARGIN), mean_ms * (1 + BEYOND_MARGIN)),)
        if model is None or model.spread < SPREAD_LEAST:
            return (Window(0, RANGE_MINUTES * MINUTE_MS),)
        head = model.percentile(HEAD) * (1 - MARGIN)
        tail = (model.percentile(TAIL) + 1) * (1 + MARGIN)
        return (Window(math.floor(head) * MINUTE_MS if head >= 1 else 0, tail * MINUTE_MS),)


@dataclass(slots=True)
class ExpectedValueKeepAlive:
    """Ours, for models of one size and load time; `price` is the least hazard (arrivals per ms) that pays."""

    forecaster: Forecaster
    price: float

    def record(self, version: VersionKey, at_ms: int) -> None:
        """See `KeepAlivePolicy`."""
        self.forecaster.record(version, at_ms)

    def windows(self, version: VersionKey) -> tuple[Window, ...]:
        """See `KeepAlivePolicy`."""
        found = self.forecaster.law(version)
        return () if found is None else tuple(Window(low, high) for low, high in found.warm_spans(self.price))

"""The predictors of a model's next arrival. Each states a density for its back-test and pieces for a law.

- timer: fine bins; finds periods, several of them too (Shahrad et al., ATC 2020, section 4.2, with finer bins).
- histogram: coarse bins, long memory, and an exponential law of the same mean; irregular models. The default.
- recent: the same of the last handful of gaps; a model that has just changed.
- trend: log-normal gaps around the level and slope of their log (Holt); rising and falling models.
- day: arrivals by half hour of the day; models of office hours.
- pooled: what models with such a last gap did; models of which little is known.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.domain.warmth.gap_bins import CLASSES, GapBins
from services.scheduler.domain.warmth.gap_counts import GapCounts, Population

Piece = tuple[float, float, float]  # from ms, to ms, weight

LONG_KEEP = 0.98  # 50 gaps are remembered: half a day of a timer of a quarter of an hour
RECENT_KEEP = 0.75  # 4 gaps
POOLED_WEIGHT = 1.0  # what other models' gaps weigh, in gaps of one's own
EXPONENTIAL_WEIGHT = 20.0  # and an exponential law of the own mean: tuned on the first halves of the traces (0 to 1000)
LEVEL_SHARE = 0.5  # Holt's smoothing of the level: a guess
SLOPE_SHARE = 0.2  # and of the slope: a guess; both quick, for a slow trend is seen by the histograms too
ERROR_SHARE = 0.1  # smoothing of the squared error: a guess
VARIANCE_LEAST = 0.03  # (ln 1.19)²: the coarse classes are no finer
LEAST = 1e-12  # weight of a piece that is next to impossible: the law stays positive up to its last edge
DAY_MS = 86_400_000
DAY_SLOTS = 48  # half hours
SLOT_MS = DAY_MS // DAY_SLOTS


@dataclass(frozen=True, slots=True)
class Arrival:
    """An arrival and the gap before it."""

    at_ms: int
    gap_ms: int
    coarse: int  # class of the gap
    fine: int  # bin of the gap
    before: "Context"


@dataclass(frozen=True, slots=True)
class Context:
    """What is known when a gap begins."""

    at_ms: int
    row: int = 0  # of the population: by the gap before
    again: int = -1  # fine bin of the gap before; negative if there was none


class Predictor(Protocol):
    """One way to foresee the next gap. O(1) an arrival, O(bins) a law."""

    def density(self, arrival: Arrival) -> float:
        """The chance per ms that it gave to this gap, before `learn` has seen it."""
        ...

    def learn(self, arrival: Arrival) -> None:
        """Take an arrival in."""
        ...

    def pieces(self, context: Context) -> Iterator[Piece]:
        """The law of the gap that begins."""
        ...


@dataclass(slots=True)
class Fine:
    """timer."""

    bins: GapBins
    population: Population
    counts: GapCounts = field(default_factory=lambda: GapCounts(LONG_KEEP))

    def density(self, arrival: Arrival) -> float:
        """See `Predictor`."""
        low, high = self.bins.span(arrival.fine)
        own = self.counts.weight(arrival.fine) / (high - low)
        pooled = POOLED_WEIGHT * _pooled(self.population, arrival)
        return (own + pooled) / (self.counts.seen + POOLED_WEIGHT)

    def learn(self, arrival: Arrival) -> None:
        """See `Predictor`."""
        self.counts.add(arrival.fine)

    def pieces(self, context: Context) -> Iterator[Piece]:
        """See `Predictor`."""
        yield from self.population.pieces(context.row, context.again, POOLED_WEIGHT)
        for index, weight in self.counts.weights():
            yield (*self.bins.span(index), weight)


@dataclass(slots=True)
class Coarse:
    """histogram and recent. The exponential part takes the noise out of few counts; many counts outweigh it."""

    bins: GapBins
    population: Population
    keep: float
    exponential_weight: float
    mean_ms: float = 0.0
    counts: GapCounts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = GapCounts(self.keep)

    def density(self, arrival: Arrival) -> float:
        """See `Predictor`."""
        pooled = POOLED_WEIGHT * _pooled(self.population, arrival)
        if not self.mean_ms:
            return pooled / POOLED_WEIGHT
        own = self.counts.weight(arrival.coarse) / self.population.widths[arrival.coarse]
        smooth = self._smoothing * math.exp(-arrival.gap_ms / self.mean_ms) / self.mean_ms
        return (own + smooth + pooled) / (self.counts.seen + self._smoothing + POOLED_WEIGHT)

    def learn(self, arrival: Arrival) -> None:
        """See `Predictor`."""
        self.counts.add(arrival.coarse)
        self.mean_ms += (arrival.gap_ms - self.mean_ms) / self.counts.seen

    def pieces(self, context: Context) -> Iterator[Piece]:
        """See `Predictor`."""
        yield from self.population.pieces(context.row, context.again, POOLED_WEIGHT)
        for coarse, weight in self.counts.weights():
            yield (*self.population.spans[coarse], weight)
        if self.mean_ms:
            yield from _exponential(self.population.spans, self.mean_ms, self._smoothing)

    @property
    def _smoothing(self) -> float:
        return min(self.exponential_weight, self.counts.seen)


@dataclass(slots=True)
class Pooled:
    """pooled; it learns through the population."""

    population: Population

    def density(self, arrival: Arrival) -> float:
        """See `Predictor`."""
        return _pooled(self.population, arrival)

    def learn(self, arrival: Arrival) -> None:
        """See `Predictor`."""

    def pieces(self, context: Context) -> Iterator[Piece]:
        """See `Predictor`."""
        return self.population.pieces(context.row, context.again, 1.0)


@dataclass(slots=True)
class Trend:
    """trend. The log of the gap is normal around level + slope, as wide as the past errors."""

    bins: GapBins
    level: float = math.nan
    slope: float = 0.0
    variance: float = 1.0  # of the errors, in nats²; an exponential law has pi²/6

    def density(self, arrival: Arrival) -> float:
        """See `Predictor`."""
        if math.isnan(self.level):
            return 0.0
        gap_ms = max(arrival.gap_ms, self.bins.step_ms / 2)
        error = math.log(gap_ms) - self.level - self.slope
        return math.exp(-error * error / (2 * self.variance)) / (gap_ms * math.sqrt(2 * math.pi * self.variance))

    def learn(self, arrival: Arrival) -> None:
        """See `Predictor`."""
        log_gap = math.log(max(arrival.gap_ms, self.bins.step_ms / 2))
        if math.isnan(self.level):
            self.level = log_gap
            return
        error = log_gap - self.level - self.slope
        self.level += self.slope + LEVEL_SHARE * error
        self.slope += SLOPE_SHARE * error
        self.variance = max(VARIANCE_LEAST, self.variance + ERROR_SHARE * (error * error - self.variance))

    def pieces(self, context: Context) -> Iterator[Piece]:
        """See `Predictor`."""
        before, scale = 0.0, math.sqrt(2 * self.variance)
        for coarse in range(CLASSES):
            low, high = self.bins.coarse_span(coarse)
            after = (1 + math.erf((math.log(high) - self.level - self.slope) / scale)) / 2
            yield low, high, after - before + LEAST
            before = after


@dataclass(slots=True)
class DayProfile:
    """day. The rate of a half hour is its mean over the days seen and one day at the overall rate."""

    since_ms: int = -1
    last_ms: int = 0
    arrivals: int = 0
    slots: list[int] = field(default_factory=lambda: [0] * DAY_SLOTS)

    def density(self, arrival: Arrival) -> float:
        """See `Predictor`."""
        if self.arrivals == 0:
            return 0.0
        start_ms = arrival.at_ms - arrival.gap_ms
        expected = self._expected(start_ms, arrival.at_ms)
        return math.exp(-expected) * self._rate(arrival.at_ms) / SLOT_MS

    def learn(self, arrival: Arrival) -> None:
        """See `Predictor`."""
        if self.since_ms < 0:
            self.since_ms = arrival.at_ms - arrival.gap_ms
        self.last_ms = arrival.at_ms
        self.arrivals += 1
        self.slots[arrival.at_ms // SLOT_MS % DAY_SLOTS] += 1

    def pieces(self, context: Context) -> Iterator[Piece]:
        """See `Predictor`."""
        at_ms, alive = context.at_ms, 1.0
        for _ in range(DAY_SLOTS + 1):
            end_ms = (at_ms // SLOT_MS + 1) * SLOT_MS
            left = alive * math.exp(-self._rate(at_ms) * (end_ms - at_ms) / SLOT_MS)
            yield float(at_ms - context.at_ms), float(end_ms - context.at_ms), alive - left + LEAST
            at_ms, alive = end_ms, left
        yield float(DAY_MS * 2), float(DAY_MS * 4), alive

    def _rate(self, at_ms: int) -> float:
        """Arrivals in a half hour like this one."""
        slot = at_ms // SLOT_MS % DAY_SLOTS
        first, last = self.since_ms // SLOT_MS, self.last_ms // SLOT_MS
        passes = (last - slot) // DAY_SLOTS - (first - 1 - slot) // DAY_SLOTS  # how often this half hour has been
        return (self.slots[slot] + self.arrivals / (last - first + 1)) / (passes + 1)

    def _expected(self, start_ms: int, end_ms: int) -> float:
        """Arrivals expected between two times; at most a day of slots is looked at."""
        days, rest_ms = divmod(end_ms - start_ms, DAY_MS)
        expected, at_ms = days * sum(self.slots) / max(1, (self.last_ms - self.since_ms) // DAY_MS), start_ms
        while at_ms < start_ms + rest_ms:
            until_ms = min((at_ms // SLOT_MS + 1) * SLOT_MS, start_ms + rest_ms)
            expected += self._rate(at_ms) * (until_ms - at_ms) / SLOT_MS
            at_ms = until_ms
        return expected


def _exponential(spans: Iterable[tuple[float, float]], mean_ms: float, weight: float) -> Iterator[Piece]:
    before = 1.0
    for low, high in spans:
        after = math.exp(-high / mean_ms)
        yield low, high, weight * (before - after) + LEAST
        before = after


def _pooled(population: Population, arrival: Arrival) -> float:
    width = 0.0
    if arrival.fine == arrival.before.again:
        low, high = population.bins.span(arrival.fine)
        width = high - low
    return population.density(arrival.before.row, arrival.coarse, width)

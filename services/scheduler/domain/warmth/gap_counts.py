"""Counts of gaps that forget: what one model's past says of its next gap, and what all models' pasts say together.

Forgetting costs nothing: instead of shrinking every old count, the next one weighs more. Memory is bounded: a full
table drops its lightest bin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.domain.warmth.gap_bins import CLASSES, GapBins

HEAVY = 1e9  # counts are scaled back before floats lose the small ones
BINS_MOST = 64  # bins a model may hold: a guess; the traces' timers need fewer than ten
SPREAD = 0.5  # weight of the even spread over the coarse classes in a row of `Population`: a guess, soon outweighed
NEVER = 1.0  # weight of "does not come back" in the same row: a guess


@dataclass(slots=True)
class GapCounts:
    """Decayed counts by bin. Mutable; owned by one predictor."""

    keep: float  # what is left of a count after one more arrival; 1 / (1 - keep) arrivals are remembered
    bins: dict[int, float] = field(default_factory=dict)
    total: float = 0.0
    step: float = 1.0

    def add(self, index: int) -> None:
        """Count one gap. O(1), but O(bins) when the table is full or is scaled back."""
        self.step /= self.keep
        self.bins[index] = self.bins.get(index, 0.0) + self.step
        self.total += self.step
        if len(self.bins) > BINS_MOST:
            lightest = min(self.bins, key=lambda each: (self.bins[each], each))
            self.total -= self.bins.pop(lightest)
        if self.step > HEAVY:
            self.bins = {index: weight / self.step for index, weight in self.bins.items()}
            self.total /= self.step
            self.step = 1.0

    def weight(self, index: int) -> float:
        """How often this bin was met, in arrivals of now."""
        return self.bins.get(index, 0.0) / self.step

    @property
    def seen(self) -> float:
        """Arrivals remembered."""
        return self.total / self.step

    def weights(self) -> Iterator[tuple[int, float]]:
        """Every bin with its weight."""
        for index, weight in self.bins.items():
            yield index, weight / self.step


@dataclass(slots=True)
class Population:
    """The gaps of all models, by the coarse class of the gap before: how a model behaves of which little is known.

    Row 0 is for models whose first gap is still open. Also how often a gap repeats the one before: where many
    models are timers, one is known by its second gap. Mutable; O(1) an arrival; CLASSES² numbers in all.
    """

    bins: GapBins
    rows: list[list[float]] = field(default_factory=lambda: [[SPREAD] * CLASSES for _ in range(CLASSES + 1)])
    totals: list[float] = field(default_factory=lambda: [SPREAD * CLASSES + NEVER] * (CLASSES + 1))
    repeats: list[float] = field(default_factory=lambda: [0.0] * (CLASSES + 1))
    spans: list[tuple[float, float]] = field(init=False)
    widths: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = [self.bins.coarse_span(coarse) for coarse in range(CLASSES)]
        self.widths = [high - low for low, high in self.spans]

    def add(self, row: int, coarse: int, repeated: bool) -> None:
        """Count one gap of some model."""
        self.totals[row] += 1
        if repeated:
            self.repeats[row] += 1
        else:
            self.rows[row][coarse] += 1

    def density(self, row: int, coarse: int, repeated_width_ms: float) -> float:
        """The chance per ms of a gap in this class; the width of its fine bin if it repeats the gap before, else 0."""
        again = self.repeats[row] / repeated_width_ms if repeated_width_ms else 0.0
        return (self.rows[row][coarse] / self.widths[coarse] + again) / self.totals[row]

    def pieces(self, row: int, again: int, weight: float) -> Iterator[tuple[float, float, float]]:
        """The row as pieces of a law, with the given total weight; what never comes back lies beyond the last class.

        `again` is the fine bin of the gap before; negative if there was none.
        """
        scale, high = weight / self.totals[row], 0.0
        for (low, high), count in zip(self.spans, self.rows[row], strict=True):
            yield low, high, count * scale
        yield high, high * 2, NEVER * scale
        if again >= 0:
            yield (*self.bins.span(again), self.repeats[row] * scale)

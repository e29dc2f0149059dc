"""Bins for the time between two arrivals: fine enough for a timer, few enough for ten thousand models.

Log-linear, as in HdrHistogram: bins of one step up to 64 steps, then 32 bins an octave, so a bin is never wider than
1/32 of the gap it stands for. Coarse classes (two an octave) serve where many models are pooled.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

LINEAR = 64  # steps with a bin of their own: an hour of minutes, the longest common period of timers
PER_OCTAVE = 32  # relative width <= 1/32: a timer of a day is known to 45 minutes, one of an hour to a minute
CLASSES = 40  # coarse classes: 2 an octave up to 6 days of seconds; longer gaps share the last
EDGES = (0, 1, 2, 3, *(round(2 ** (half / 2)) for half in range(4, CLASSES + 1)))  # of the classes; whole steps


@dataclass(frozen=True, slots=True)
class GapBins:
    """Bins over gaps; `step_ms` is the finest width."""

    step_ms: int

    def index(self, gap_ms: float) -> int:
        """The bin of a gap >= 0."""
        steps = gap_ms / self.step_ms
        if steps < LINEAR:
            return int(steps)
        octave = int(math.log2(steps / LINEAR)) + 1
        return PER_OCTAVE * octave + int(steps / (1 << octave))

    def span(self, index: int) -> tuple[float, float]:
        """The gaps of a bin, in ms: from (included), to (not included)."""
        if index < LINEAR:
            return float(index * self.step_ms), float((index + 1) * self.step_ms)
        octave = index // PER_OCTAVE - 1
        first = index - PER_OCTAVE * octave
        width = self.step_ms << octave
        return float(first * width), float((first + 1) * width)

    def coarse(self, gap_ms: float) -> int:
        """The coarse class of a gap: 0 is below one step."""
        return min(CLASSES, bisect_right(EDGES, gap_ms / self.step_ms)) - 1

    def coarse_span(self, index: int) -> tuple[float, float]:
        """The gaps of a coarse class, in ms."""
        return float(EDGES[index] * self.step_ms), float(EDGES[index + 1] * self.step_ms)

"""Bins for the time between two arrivals: fine enough for a timer, few enough for ten thousand models.

Log-linear, as in HdrHistogram: bins of one step up to 64 steps, then 32 bins an octave, so a bin is never wider than
1/32 of the gap it stands for. Coarse classes (two an octave) serve where many models are pooled.
"""

import math
from dataclasses import dataclass

LINEAR = 64  # steps with a bin of their own: an hour of minutes, the longest common period of timers
PER_OCTAVE = 32  # relative width <= 1/32: a timer of a day is known to 45 minutes, one of an hour to a minute
CLASSES = 40  # coarse classes: 2 an octave, 20 octaves = 12 days of seconds; longer gaps share the last


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
        steps = gap_ms / self.step_ms
        return 0 if steps < 1 else min(CLASSES - 1, 1 + int(2 * math.log2(steps)))

    def coarse_span(self, index: int) -> tuple[float, float]:
        """The gaps of a coarse class, in ms."""
        if index == 0:
            return 0.0, float(self.step_ms)
        return self.step_ms * 2 ** ((index - 1) / 2), self.step_ms * 2 ** (index / 2)

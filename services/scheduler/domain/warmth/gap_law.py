"""The law of the time from one arrival to the next, and what follows from it for a model that has been idle a while.

A law is piecewise uniform; beyond its last edge it decays exponentially with that edge as its mean (nothing is known
there: a model that has been away for long is expected to stay away about as long again). Everything is conditional on
the age: the time since the last arrival.

The worth of a place in memory is an index in the sense of Gittins (1979): the best ratio, over all times T that the
place could be held, of the chance that an arrival comes within T to the expected time the place is held. For a timer
that is one over the time left, for a memoryless stream its rate. LHD (Beckmann, NSDI 2018) ranks by the same density.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

TINY = 1e-12  # a probability that counts as none; keeps the divisions below finite


@dataclass(frozen=True, slots=True)
class GapLaw:
    """`reached[i]` = chance that the gap is below `edges_ms[i]`; `held[i]` = integral of the survival up to there."""

    edges_ms: tuple[float, ...]
    reached: tuple[float, ...]
    held: tuple[float, ...]

    def survival(self, gap_ms: float) -> float:
        """The chance that the next arrival comes later than this after the last one."""
        place = bisect_right(self.edges_ms, gap_ms) - 1
        if place >= len(self.edges_ms) - 1:
            beyond = gap_ms - self.edges_ms[-1]
            return float((1 - self.reached[-1]) * 2.0 ** (-beyond / self.edges_ms[-1]))
        low, high = self.edges_ms[place], self.edges_ms[place + 1]
        share = (gap_ms - low) / (high - low)
        return 1 - (self.reached[place] + share * (self.reached[place + 1] - self.reached[place]))

    def worth_per_ms(self, age_ms: float) -> float:
        """Arrivals served warm per ms that a place is held from now on, at best. O(edges)."""
        alive = self.survival(age_ms)
        last = self.edges_ms[-1]
        if alive <= TINY or age_ms >= last:
            return 0.7 / max(last, age_ms)  # the tail halves every `last`: ln 2 / last, and less the longer it lasts
        first = bisect_right(self.edges_ms, age_ms)
        edge, gone = self.edges_ms[first], 1 - alive
        spent = self.held[first] - (alive + 1 - self.reached[first]) / 2 * (edge - age_ms)
        best = 0.0
        for reached, held in zip(self.reached[first:], self.held[first:], strict=True):
            ratio = (reached - gone) / (held - spent + TINY)
            if ratio > best:
                best = ratio
        return best

    def quantile_ms(self, age_ms: float, share: float) -> float:
        """When the next arrival has come with this chance, in ms from now, for a model idle for `age_ms`."""
        goal = 1 - self.survival(age_ms) * (1 - share)
        place = bisect_right(self.reached, goal)
        if place >= len(self.reached):
            return max(0.0, self.edges_ms[-1] * 2 - age_ms)
        low, high = self.reached[place - 1], self.reached[place]
        edge = self.edges_ms[place - 1]
        return max(0.0, edge + (goal - low) / (high - low) * (self.edges_ms[place] - edge) - age_ms)

    def hazards(self) -> Iterator[tuple[float, float, float]]:
        """For each piece: from age, to age (ms), arrivals per ms among the models that are still idle."""
        for place in range(len(self.edges_ms) - 1):
            came, held = self.reached[place + 1] - self.reached[place], self.held[place + 1] - self.held[place]
            yield self.edges_ms[place], self.edges_ms[place + 1], came / max(held, TINY)

    def warm_spans(self, hazard_least_per_ms: float) -> list[tuple[float, float]]:
        """The ages (from ms, to ms) at which an arrival is likely enough. In order, merged. O(edges)."""
        spans: list[tuple[float, float]] = []
        for low, high, hazard in self.hazards():
            if hazard < hazard_least_per_ms:
                continue
            if spans and spans[-1][1] >= low:
                spans[-1] = (spans[-1][0], high)
            else:
                spans.append((low, high))
        return spans


def law(pieces: Iterable[tuple[float, float, float]]) -> GapLaw:
    """A law from pieces (from ms, to ms, weight), which may overlap; weights need not sum to 1. O(n log n)."""
    steps: dict[float, float] = {0.0: 0.0}
    for low, high, weight in pieces:
        density = weight / (high - low)
        steps[low] = steps.get(low, 0.0) + density
        steps[high] = steps.get(high, 0.0) - density
    edges = sorted(steps)
    masses, density = [0.0], 0.0
    for low, high in pairwise(edges):
        density += steps[low]
        masses.append(masses[-1] + max(0.0, density) * (high - low))
    total = masses[-1] or 1.0
    reached = [mass / total for mass in masses]
    held = [0.0]
    for place in range(1, len(edges)):
        held.append(held[-1] + (1 - (reached[place - 1] + reached[place]) / 2) * (edges[place] - edges[place - 1]))
    return GapLaw(tuple(edges), tuple(reached), tuple(held))

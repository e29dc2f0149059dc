"""A trace of 27 tenants replayed at overload through the production queue: service gaps and Jain's index.

The trace is a sample of public chatbot battles, one tenant a model. Its arrivals are compressed until the work offered
is `--overload` times what the slots can do. A gap is how much more of real service (uncached input + 2 × output) one of
two tenants was granted than the other while both were waiting without a break. The bound is invariant 2: twice the
largest request, plus the burst credit of two requests.

Jain's index cannot be of what tenants got: many ask for less than an equal share, and a fair server gives them just
that. The reference is the fluid server of the same speed (generalized processor sharing): at each grant it divides as
many units equally among the tenants that are backlogged there, each at most what it has left. The index is of what was
granted over what the fluid server gave, when the last request arrives, while the overload lasts; of the backlogged
tenants (the fluid server still owes them something), if their share was at least the bound: one request more or less
is no unfairness, and the whole share of some tenants is one request.
"""

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.report import Goal, Report
from benchmarks.simulation_worker import Arrival, Fair, Served, serve
from services.scheduler.domain.service import Policy

NAME = "arena"
DESCRIPTION = "27 tenants at overload: largest service gap against the bound, Jain's index"

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
OUTPUT_MAX = 2_048  # what clients allow; a guess, the trace does not say
# A 7B model on one device of the A100 class, a guess of its order: only ratios matter, the load is scaled to them.
PREFILL_US, DECODE_US = 100, 15_000  # a token
EPSILON = 1e-6  # units: rounding of divisions
JAIN_LEAST = 0.95  # a guess; what is missing to 1 is the size of single requests and the burst credit


def run(arguments: Sequence[str]) -> Report:
    """Measure. Raises FileNotFoundError without the trace."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    parser.add_argument("--trace", type=Path, default=DATA / "chatbot_arena_multitenant.csv.gz")
    parser.add_argument("--overload", type=float, default=2.0)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args(arguments)
    arrivals = compressed(read(options.trace), options.overload, options.slots)
    policy = Policy()
    served = serve(arrivals, Fair(policy, options.slots))
    gaps = Gaps()
    gaps.replay(arrivals, served)
    largest = max(each.units for each in arrivals)
    bound = (2 + policy.credit_requests) * largest
    fluid = Fluid()
    fluid.replay(arrivals, served)
    of_all, of_backlogged = fluid.shares(), fluid.shares(backlogged_above=bound)
    figures = {
        "requests": len(arrivals),
        "tenants": len(gaps.granted),
        "largest_gap_units": gaps.largest,
        "tenants_backlogged_with_more_than_the_bound": len(of_backlogged),
        "jains_index_of_backlogged_tenants": round(jains_index(of_backlogged), 4),
        "jains_index_of_all_tenants": round(jains_index(of_all), 4),
        "jains_index_of_units_granted": round(jains_index([*fluid.granted.values()]), 4),
        "least_of_their_shares": round(min(of_backlogged), 4),
        "largest_of_their_shares": round(max(of_backlogged), 4),
        "farthest_from_the_fluid_server_units": round(fluid.farthest()),
    }
    goals = (
        Goal.at_most("largest gap / bound", 1, gaps.largest / bound),
        Goal.at_least("Jain's index of backlogged tenants", JAIN_LEAST, jains_index(of_backlogged)),
    )
    return Report(NAME, figures, {"bound_units": bound, "largest_request_units": largest}, goals)


def read(path: Path) -> list[Arrival]:
    """The trace, in order of time."""
    with gzip.open(path, "rt") as lines:
        rows = list(csv.DictReader(lines))
    return [_arrival(row) for row in rows]


def _arrival(row: dict[str, str]) -> Arrival:
    read_tokens, written = max(1, int(row["input_tokens"])), int(row["output_tokens"])
    run_ms = max(1, (read_tokens * PREFILL_US + written * DECODE_US) // 1000)
    at_ms = round(float(row["arrival_s"]) * 1000)
    return Arrival(at_ms, row["tenant_id"], run_ms, read_tokens, written, max(written, OUTPUT_MAX))


def compressed(arrivals: Sequence[Arrival], overload: float, slots: int) -> list[Arrival]:
    """The same requests in the time in which the slots can do 1/overload of them."""
    length_ms = sum(each.run_ms for each in arrivals) / slots / overload
    factor = length_ms / max(1, arrivals[-1].at_ms)
    return [replace(each, at_ms=round(each.at_ms * factor)) for each in arrivals]


def jains_index(values: Sequence[float]) -> float:
    """1 = all equal, 1/n = one has everything (Jain, Chiu and Hawe, 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@dataclass(slots=True)
class Fluid:
    """The fluid server beside the real one. Both have given as many units in total at any time."""

    granted: dict[str, int] = field(default_factory=dict)
    _given: dict[str, float] = field(default_factory=dict)
    _left: dict[str, float] = field(default_factory=dict)

    def replay(self, arrivals: Sequence[Arrival], served: Sequence[Served]) -> None:
        """Arrivals and grants in order of time, until the last request has arrived."""
        until_ms = arrivals[-1].at_ms
        events = [(each.at_ms, 0, n, each) for n, each in enumerate(arrivals)]
        events += [
            (each.granted_ms, 1, n, each.arrival) for n, each in enumerate(served) if each.granted_ms <= until_ms
        ]
        for _, is_grant, _, arrival in sorted(events, key=lambda event: event[:3]):
            if is_grant:
                self.granted[arrival.tenant] = self.granted.get(arrival.tenant, 0) + arrival.units
                self._give(arrival.units)
            else:
                self._left[arrival.tenant] = self._left.get(arrival.tenant, 0) + arrival.units

    def shares(self, *, backlogged_above: float | None = None) -> list[float]:
        """Granted over given; or only of those that have something left here and were given at least that much."""
        return [
            self.granted.get(name, 0) / given
            for name, given in self._given.items()
            if backlogged_above is None or (self._left[name] > 0 and given >= backlogged_above)
        ]

    def farthest(self) -> float:
        """The largest difference of a tenant between granted and given, in units."""
        return max(abs(self.granted.get(name, 0) - given) for name, given in self._given.items())

    def _give(self, units: float) -> None:
        """Equally to all who have something left; what one cannot take goes to the others."""
        while units > EPSILON and (waiting := [name for name, left in self._left.items() if left > 0]):
            each = min(units / len(waiting), min(self._left[name] for name in waiting))
            for name in waiting:
                self._left[name] -= each if self._left[name] - each > EPSILON else self._left[name]
                self._given[name] = self._given.get(name, 0) + each
            units -= each * len(waiting)


@dataclass(slots=True)
class Gaps:
    """What each pair of tenants was granted while both waited without a break."""

    largest: int = 0
    granted: dict[str, int] = field(default_factory=dict)
    _waiting: dict[str, int] = field(default_factory=dict)
    _ranges: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def replay(self, arrivals: Sequence[Arrival], served: Sequence[Served]) -> None:
        """Go through arrivals and grants in order of time."""
        events = [(each.at_ms, 0, n, each) for n, each in enumerate(arrivals)]
        events += [(each.granted_ms, 1, n, each.arrival) for n, each in enumerate(served)]
        for _, is_grant, _, arrival in sorted(events, key=lambda event: event[:3]):
            if is_grant:
                self._grant(arrival)
            else:
                self._waiting[arrival.tenant] = self._waiting.get(arrival.tenant, 0) + 1

    def _grant(self, arrival: Arrival) -> None:
        tenant = arrival.tenant
        self.granted[tenant] = self.granted.get(tenant, 0) + arrival.units
        waiting = [name for name, count in self._waiting.items() if count]
        for name in waiting:
            if name != tenant:
                self._note(tenant, name, arrival.units)
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            for pair in [each for each in self._ranges if tenant in each]:
                del self._ranges[pair]

    def _note(self, tenant: str, other: str, units: int) -> None:
        one, two = sorted((tenant, other))
        now = self.granted.get(one, 0) - self.granted.get(two, 0)
        before = now - (units if tenant == one else -units)
        low, high = self._ranges.get((one, two), (before, before))
        self._ranges[(one, two)] = (min(low, now), max(high, now))
        self.largest = max(self.largest, max(high, now) - min(low, now))

"""A trace of 27 tenants replayed at overload through the production queue: service gaps and Jain's index.

The trace is a sample of public chatbot battles, one tenant a model. Its arrivals are compressed until the work offered
is `--overload` times what the slots can do. A gap is how much more of real service (uncached input + 2 × output) one of
two tenants was granted than the other while both were waiting without a break. The bound is invariant 2: twice the
largest request, plus the burst credit of two requests. Jain's index is of what each tenant got over its equal share of
every grant made while it waited, among tenants whose share was at least the bound (shorter waits are all granularity).
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
    shares = gaps.shares(bound)
    jain = jains_index(shares)
    figures = {
        "requests": len(arrivals),
        "tenants": len(gaps.granted),
        "largest_gap_units": gaps.largest,
        "tenants_long_enough_for_jain": len(shares),
        "jains_index": round(jain, 4),
    }
    goals = (Goal.at_most("largest gap / bound", 1, gaps.largest / bound),)
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
class Gaps:
    """What each pair of tenants was granted while both waited without a break."""

    largest: int = 0
    granted: dict[str, int] = field(default_factory=dict)
    _waiting: dict[str, int] = field(default_factory=dict)
    _ranges: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _granted_waiting: dict[str, int] = field(default_factory=dict)
    _entitled: dict[str, float] = field(default_factory=dict)

    def replay(self, arrivals: Sequence[Arrival], served: Sequence[Served]) -> None:
        """Go through arrivals and grants in order of time."""
        events = [(each.at_ms, 0, n, each) for n, each in enumerate(arrivals)]
        events += [(each.granted_ms, 1, n, each.arrival) for n, each in enumerate(served)]
        for _, is_grant, _, arrival in sorted(events, key=lambda event: event[:3]):
            if is_grant:
                self._grant(arrival)
            else:
                self._waiting[arrival.tenant] = self._waiting.get(arrival.tenant, 0) + 1

    def shares(self, least_units: int) -> list[float]:
        """What each tenant got of its equal share while it waited; of those entitled to `least_units` or more."""
        return [
            self._granted_waiting.get(name, 0) / units for name, units in self._entitled.items() if units >= least_units
        ]

    def _grant(self, arrival: Arrival) -> None:
        tenant = arrival.tenant
        self.granted[tenant] = self.granted.get(tenant, 0) + arrival.units
        waiting = [name for name, count in self._waiting.items() if count]
        for name in waiting:
            self._entitled[name] = self._entitled.get(name, 0) + arrival.units / len(waiting)
            if name != tenant:
                self._note(tenant, name, arrival.units)
        self._granted_waiting[tenant] = self._granted_waiting.get(tenant, 0) + arrival.units
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

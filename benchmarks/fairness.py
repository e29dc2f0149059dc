"""A noisy tenant beside two quiet ones on one worker: what the quiet ones wait, under several queue disciplines.

The scenario of the fair-queueing literature with arrivals fixed by a seed, on virtual time, in the production
`FairQueue`: one worker of 10 ms a request; quiet tenants at 15 requests/s each, a noisy one at 20 with two seconds at
250. Then two always backlogged tenants whose requests cost 10:1, whose token shares must be equal.
"""

import argparse
import random
from collections.abc import Sequence

from benchmarks.report import Figure, Goal, Report
from benchmarks.simulation_worker import Arrival, Discipline, Fair, Fifo, quantile, serve
from services.scheduler.domain.service import Policy

NAME = "fairness"
DESCRIPTION = "waits of quiet tenants beside a noisy one: FIFO, fair with burst credit, strict priority; token shares"

RUN_MS = 10
QUIET = ("quiet1", "quiet2")
BURST = range(2_000, 4_000)  # ms
LENGTH_MS = 6_000
SHARES_MS = 120_000


def run(arguments: Sequence[str]) -> Report:
    """Measure; no options yet."""
    argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION).parse_args(arguments)
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    _add(figures, "fifo", Fifo(), arrivals())
    worst = {credit: _add(figures, f"credit{credit}", _fair(credit), arrivals()) for credit in (0, 2, 4)}
    _add(figures, "credit0_noisy_weight2", _fair(0), arrivals(noisy_weight_milli=2_000))
    _add(limits, "strict_priority", Fifo(first=lambda tenant: tenant in QUIET), arrivals())
    share = token_share(10)
    figures["token_share_of_large_requests"] = share
    goals = (
        Goal.at_most("worst quiet p99 at credit 2, ms", 70, worst[2]),
        Goal.at_most("worst quiet p99 at credit 4, ms", 50, worst[4]),
        Goal.at_most("token share at costs 10:1: distance from 0.5", 0.05, abs(share - 0.5)),
    )
    return Report(NAME, figures, limits, goals)


def arrivals(noisy_weight_milli: int = 1_000) -> list[Arrival]:
    """The seeded arrivals, in order of time; at one millisecond noisy before quiet1 before quiet2."""
    random.seed(42)
    found = [
        Arrival(at_ms, tenant, RUN_MS, weight_milli=noisy_weight_milli if tenant == "noisy" else 1_000)
        for tenant in ("noisy", *QUIET)
        for at_ms in range(LENGTH_MS)
        if random.random() < _rate(tenant, at_ms) / 1_000
    ]
    return sorted(found, key=lambda each: each.at_ms)


def token_share(ratio: int) -> float:
    """What a tenant of requests `ratio` times as large gets of the tokens while both always wait."""
    large = Arrival(0, "large", RUN_MS * ratio, 10 * ratio, 45 * ratio, 1_000)
    small = Arrival(0, "small", RUN_MS, 10, 45, 1_000)
    count = SHARES_MS // RUN_MS
    served = serve([each for _ in range(count) for each in (large, small)][: 2 * count], _fair(2), SHARES_MS)
    units = {
        name: sum(each.arrival.units for each in served if each.arrival.tenant == name) for name in ("large", "small")
    }
    return round(units["large"] / sum(units.values()), 4)


def _rate(tenant: str, at_ms: int) -> int:
    if tenant != "noisy":
        return 15
    return 250 if at_ms in BURST else 20


def _fair(credit: int) -> Discipline:
    return Fair(Policy(credit_requests=credit))


def _add(figures: dict[str, Figure], name: str, discipline: Discipline, incoming: Sequence[Arrival]) -> int:
    """Run, note both quiet tenants' p99, return the worse."""
    served = serve(incoming, discipline)
    worst = 0
    for tenant in QUIET:
        p99 = quantile([each.wait_ms for each in served if each.arrival.tenant == tenant], 0.99)
        figures[f"{name}_{tenant}_p99_wait_ms"] = p99
        worst = max(worst, p99)
    return worst

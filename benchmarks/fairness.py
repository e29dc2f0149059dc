"""A noisy tenant beside two quiet ones on one worker: what the quiet ones wait, under several queue disciplines.

The scenario of the fair-queueing literature with arrivals fixed by a seed, on virtual time, in the production
`FairQueue`: one worker of 10 ms a request; quiet tenants at 15 requests/s each, a noisy one at 20 with two seconds at
250. Then two always backlogged tenants whose requests cost 10:1, whose token shares must be equal.

With `--mesh` the same arrivals also go to a real mesh (see `fairness_mesh.py`), with the default credit or that of
`--credit`.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus

from benchmarks.fairness_mesh import Replayed, replay
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
    """Measure; `--mesh` also on real parts, which takes about 20 s."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    parser.add_argument("--mesh", action="store_true", help="also replay the arrivals on a real mesh")
    parser.add_argument(
        "--stretch", type=int, default=1, help="on the mesh, make all times N times as long, so that slow parts keep up"
    )
    parser.add_argument("--ahead", type=int, default=1, help="on the mesh, slots beyond the one request that runs")
    parser.add_argument(
        "--credit", type=int, default=Policy().credit_requests, choices=(0, 2, 4), help="on the mesh: burst credit"
    )
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    _add(figures, "fifo", Fifo(), arrivals())
    worst = {credit: _add(figures, f"credit{credit}", _fair(credit), arrivals()) for credit in (0, 2, 4)}
    for credit in (0, 2):
        _add(figures, f"credit{credit}_noisy_weight2", _fair(credit), arrivals(noisy_weight_milli=2_000))
    _add(limits, "strict_priority", Fifo(first=lambda tenant: tenant in QUIET), arrivals())
    share = token_share(10)
    figures["token_share_of_large_requests"] = share
    goals = [
        Goal.at_most("worst quiet p99 at credit 2, ms", 70, worst[2]),
        Goal.at_most("worst quiet p99 at credit 4, ms", 50, worst[4]),
        Goal.at_most("token share at costs 10:1: distance from 0.5", 0.05, abs(share - 0.5)),
    ]
    if options.mesh:
        goals += _on_the_mesh(figures, worst[options.credit], options)
    return Report(NAME, figures, limits, goals)


def _on_the_mesh(figures: dict[str, Figure], simulated_ms: int, options: argparse.Namespace) -> list[Goal]:
    """The same arrivals on real parts; the goal is against the simulator's worst quiet p99, stretched as they are."""
    run_ms = RUN_MS * options.stretch
    slower = [replace(each, at_ms=each.at_ms * options.stretch) for each in arrivals()]
    replayed = replay(slower, run_ms, options.ahead, options.credit)
    figures |= {"mesh_stretch": options.stretch, "mesh_ahead": options.ahead, "mesh_credit": options.credit}
    worst = max([_waits(figures, tenant, replayed, run_ms) for tenant in (*QUIET, "noisy")][:-1])
    figures["mesh_requests_per_second"] = round(len(replayed.answered) / replayed.span_s, 1)
    for part, seconds in replayed.cpu_s.items():
        figures[f"mesh_cpu_share_{part}"] = round(seconds / replayed.span_s, 3)
    refused = sum(each.status != HTTPStatus.OK for each in replayed.answered if each.tenant in QUIET)
    return [
        Goal.at_most("mesh: worst quiet p99 / the simulator's", 1.5, worst / (simulated_ms * options.stretch)),
        Goal.at_most("mesh: quiet requests refused", 0, refused),
    ]


def _waits(figures: dict[str, Figure], tenant: str, replayed: Replayed, run_ms: int) -> int:
    """Note what a tenant waited on the mesh; returns its p99 (what the client saw, less the run)."""
    of = [each for each in replayed.answered if each.tenant == tenant and each.status == HTTPStatus.OK]
    waits = [max(0, round(each.total_ms) - run_ms) for each in of]
    figures[f"mesh_{tenant}_p50_wait_ms"] = quantile(waits, 0.5)
    figures[f"mesh_{tenant}_p99_wait_ms"] = quantile(waits, 0.99)
    figures[f"mesh_{tenant}_p99_queue_ms"] = quantile([each.queue_ms for each in of], 0.99)
    return quantile(waits, 0.99)


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

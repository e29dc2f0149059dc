"""Many requests for one cold model at once: loads caused, and waits against the ideal. On virtual time.

Production domain and operations of two scheduler replicas; store, bus, node and gateway are the tests' fakes. The ideal
is a load that begins at once and slots that are never empty afterwards: load time + work ÷ rate.
"""

import argparse
import asyncio
from collections.abc import Sequence

from benchmarks.report import Goal, Report
from benchmarks.simulation_worker import quantile
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.harness import world_on
from tests.simulation.scheduler.mesh import model

NAME = "herd"
DESCRIPTION = "500 requests for one cold model: loads caused, latency against load time + work / rate"

TENANTS = 50  # so that no tenant's queue limit is met


def run(arguments: Sequence[str]) -> Report:
    """Measure. Options: requests, slots, run and load times in ms."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    for name, value in (("--requests", 500), ("--slots", 8), ("--run-ms", 100), ("--load-ms", 5_000)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args(arguments)
    loads, took_ms = run_virtual(_story(options.requests, options.slots, options.run_ms, options.load_ms))
    ideal_ms = [options.load_ms + (n // options.slots + 1) * options.run_ms for n in range(options.requests)]
    figures: dict[str, float | int | str] = {"loads": loads, "done": len(took_ms)}
    limits: dict[str, float | int | str] = {}
    goals = [Goal.at_most("loads", 1, loads), Goal.at_least("requests done", options.requests, len(took_ms))]
    for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        figures[f"{name}_ms"], limits[f"{name}_ms"] = quantile(took_ms, part), quantile(ideal_ms, part)
        ratio = quantile(took_ms, part) / quantile(ideal_ms, part)
        goals.append(Goal.at_most(f"{name} against the ideal", 1.2, ratio))
    return Report(NAME, figures, limits, goals)


async def _story(requests: int, slots: int, run_ms: int, load_ms: int) -> tuple[int, list[int]]:
    """Loads, and how long each request that was done took, in ms."""
    async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
        cold = model("cold", slots=slots)
        world.offer(cold)
        node, gateway = await world.node(load_ms=load_ms), await world.gateway()
        for name in ("s1", "s2"):
            await world.scheduler(name)
        await asyncio.sleep(1.5)
        asked = [gateway.ask(f"r{n}", cold, run_ms=run_ms, tenant_id=f"t{n % TENANTS}") for n in range(requests)]
        await asyncio.gather(*(gateway.submit(each) for each in asked))
        ideal_ms = load_ms + (requests // slots + 1) * run_ms
        await asyncio.sleep(2 * ideal_ms / 1000 + 1)
        done = [each.ended_ms - each.submitted_ms for each in asked if each.endings == ["done"]]
        return len(node.loads), done

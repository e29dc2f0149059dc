"""Many requests for one cold model at once, requests that meet an unload, and models that do not fit together.

On virtual time: production domain and operations of two scheduler replicas; store, bus, nodes and gateway are the
tests' fakes. The ideal of the herd is a load that begins at once and slots that are never empty afterwards: load time +
work ÷ rate. What meets an unload that has been sent waits for the reload: at most the rest of the other model's load,
its quantum, its last run, and its own load. Four models by turns in room for three is the pattern in which LRU never
hits; nobody may wait longer than one rotation, the quanta and loads of the other three.

With `--mesh` the herd also runs on an embedded cluster with real Valkey, NATS and Triton (see `herd_mesh.py`).
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.herd_mesh import stampede
from benchmarks.report import Figure, Goal, Report
from benchmarks.simulation_worker import quantile
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.fake_gateway import Asked
from tests.simulation.scheduler.harness import World, world_on
from tests.simulation.scheduler.mesh import model

NAME = "herd"
DESCRIPTION = (
    "500 requests for one cold model: loads caused, latency against load time + work / rate; unloads; rotation"
)

TENANTS = 50  # so that no tenant's queue limit is met
QUANTUM_MS = 10_000  # the default of `rotation_seconds`
LOAD_MS = 1_000  # of the models that take turns
RUN_MS = 50
SLACK_MS = 700  # two ticks and a state of the node
QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


def run(arguments: Sequence[str]) -> Report:
    """Measure. Options: requests, slots, run and load times in ms; `--mesh`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    for name, value in (("--requests", 500), ("--slots", 8), ("--run-ms", 100), ("--load-ms", 5_000)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--mesh", action="store_true", help="also on a real mesh")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    goals: list[Goal] = []
    loads, took_ms = run_virtual(_story(options.requests, options.slots, options.run_ms, options.load_ms))
    _add_herd(figures, limits, goals, "", options, loads, took_ms, options.load_ms)
    _add_unloads(figures, goals, run_virtual(_unloads()))
    _add_circle(figures, goals, *run_virtual(_circle()))
    if options.mesh:
        herd = stampede(options.requests, options.slots, options.run_ms, options.load_ms)
        figures["mesh_load_ms"] = herd.load_ms
        _add_herd(figures, limits, goals, "mesh_", options, herd.loads, herd.took_ms, herd.load_ms)
    return Report(NAME, figures, limits, goals)


def _add_herd(
    figures: dict[str, Figure],
    limits: dict[str, Figure],
    goals: list[Goal],
    prefix: str,
    options: argparse.Namespace,
    loads: int,
    took_ms: list[int],
    load_ms: int,
) -> None:
    ideal_ms = [load_ms + (n // options.slots + 1) * options.run_ms for n in range(options.requests)]
    figures |= {f"{prefix}loads": loads, f"{prefix}done": len(took_ms)}
    goals.append(Goal.at_most(f"{prefix}loads", 1, loads))
    goals.append(Goal.at_least(f"{prefix}requests done", options.requests, len(took_ms)))
    for name, part in QUANTILES:
        figures[f"{prefix}{name}_ms"] = quantile(took_ms, part)
        limits[f"{prefix}{name}_ms"] = quantile(ideal_ms, part)
        ratio = quantile(took_ms, part) / quantile(ideal_ms, part)
        goals.append(Goal.at_most(f"{prefix}{name} against the ideal", 1.2, ratio))


def _add_unloads(figures: dict[str, Figure], goals: list[Goal], waits_ms: list[int]) -> None:
    for name, part in QUANTILES:
        figures[f"met_an_unload_{name}_wait_ms"] = quantile(waits_ms, part)
    bound = LOAD_MS + QUANTUM_MS + RUN_MS + LOAD_MS + SLACK_MS
    goals.append(Goal.at_most("p99 wait of a request that met an unload, ms", bound, quantile(waits_ms, 0.99)))


def _add_circle(
    figures: dict[str, Figure], goals: list[Goal], waits_ms: list[int], hits: int, requests: int, loads: int
) -> None:
    figures |= {"circle_requests": requests, "circle_loads": loads, "circle_hit_rate": round(hits / requests, 4)}
    for name, part in QUANTILES:
        figures[f"circle_{name}_wait_ms"] = quantile(waits_ms, part)
    goals.append(Goal.at_least("hit rate of four models by turns in room for three", 0.6, hits / requests))
    goals.append(Goal.at_most("longest wait there, ms (one rotation)", 3 * (QUANTUM_MS + LOAD_MS), max(waits_ms)))


async def _story(requests: int, slots: int, run_ms: int, load_ms: int) -> tuple[int, list[int]]:
    """Loads, and how long each request that was done took, in ms."""
    async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
        cold = model("cold", slots=slots)
        world.offer(cold)
        node, gateway = await world.node(load_ms=load_ms), await world.gateway()
        for name in ("s1", "s2"):
            await world.scheduler(name)
        await _until(partial(_know_a_node, world))
        asked = [gateway.ask(f"r{n}", cold, run_ms=run_ms, tenant_id=f"t{n % TENANTS}") for n in range(requests)]
        await asyncio.gather(*(gateway.submit(each) for each in asked))
        ideal_ms = load_ms + (requests // slots + 1) * run_ms
        await _until(partial(_all_ended, asked), 2 * ideal_ms / 1000 + 1)
        done = [each.ended_ms - each.submitted_ms for each in asked if each.endings == ["done"]]
        return len(node.loads), done


async def _unloads() -> list[int]:
    """Two models in room for one. Each time one has been sent away, a request for it comes; what it waited, in ms."""
    async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
        models = [model("a"), model("b")]
        world.offer(*models)
        node, gateway = await world.node(load_ms=LOAD_MS), await world.gateway()
        for name in ("s1", "s2"):
            await world.scheduler(name)
        await _until(partial(_know_a_node, world))
        await gateway.submit(gateway.ask("first", models[0], run_ms=RUN_MS))
        met = []
        for number in range(30):
            await asyncio.sleep(2 * QUANTUM_MS / 1000)  # the model's turn is over
            gone = len(node.unloads)
            await gateway.submit(gateway.ask(f"o{number}", models[1], run_ms=RUN_MS))
            await _until(partial(_has_grown, node.unloads, gone))
            asked = gateway.ask(f"r{number}", models[0], run_ms=RUN_MS)
            met.append(asked)
            await gateway.submit(asked)
            await _until(partial(_has_grown, asked.endings, 0))
        return [each.granted_ms - each.submitted_ms for each in met]


def _has_grown(things: list[str], count: int) -> bool:
    return len(things) > count


def _know_a_node(world: World) -> bool:
    return all(each.replica.nodes.any_healthy for each in world.replicas)


def _all_ended(asked: Sequence[Asked]) -> bool:
    return all(each.endings for each in asked)


def _all_granted(asked: Sequence[Asked]) -> bool:
    return all(each.grant is not None for each in asked)


async def _until(happened: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Look each 10 ms of virtual time, so long at most."""
    for _ in range(round(limit_s * 100)):
        if happened():
            return
        await asyncio.sleep(0.01)


async def _circle() -> tuple[list[int], int, int, int]:
    """Four models by turns, a request each 250 ms, in room for three: waits, hits, requests, loads."""
    async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
        models = [model(f"m{n}", slots=4) for n in range(4)]
        world.offer(*models)
        node, gateway = await world.node(capacity=300, load_ms=LOAD_MS), await world.gateway()
        for name in ("s1", "s2"):
            await world.scheduler(name)
        await _until(partial(_know_a_node, world))
        asked = []
        for number in range(960):
            deadline_ms = world.clock.now_ms() + 600_000
            asked.append(gateway.ask(f"r{number}", models[number % 4], run_ms=RUN_MS, deadline_unix_ms=deadline_ms))
            await gateway.submit(asked[-1])
            await asyncio.sleep(0.25)  # the pace of the story
        await _until(partial(_all_granted, asked))
        waits_ms = [each.granted_ms - each.submitted_ms for each in asked]
        grants = [each.grant for each in asked]
        hits = sum(
            grant is not None and not grant.load_ms and wait_ms < LOAD_MS
            for grant, wait_ms in zip(grants, waits_ms, strict=True)
        )
        return waits_ms, hits, len(asked), len(node.loads)

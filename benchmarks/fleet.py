"""GPUs that the ServeGen tenants need at their promise: dedicated, shared with LRU, shared with our plan.

Every tenant is one fine-tuned model. A GPU holds four of them, each with eight request slots; a model takes 5 s to load
from host memory; a request runs for 20 ms an output token and 0.1 ms an input token of its tenant's mean (exponential
around it). These four are guesses for 8-billion-parameter models on 80 GB. Promise: 95 % of all requests start within
2 s. Traffic: all tenants thinned by one factor; half a day warms up, a day counts.

Dedicated = for each tenant as many GPUs (of 32 slots, one model) as its busiest ten minutes need by `needed`. LRU =
load on demand in place of the model used longest ago, another replica when requests queue. Ours = the same, victims by
expected value, and once a minute `adjusted` and `planned` over the forecasts: replicas, pre-warms, swaps.

The second part is how the time of one plan grows from 10 to 10,000 models.
"""

import argparse
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Figure, Goal, Report
from benchmarks.traces import (
    SERVEGEN_LENGTHS,
    SERVEGEN_LOAD,
    WINDOW_MS,
    Access,
    data_option,
    mean_lengths,
    require,
    tenants,
    thinned,
)
from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.eviction import Candidate, EvictionPolicy, LeastRecentlyUsed, Use
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.memory_plan import NodeMemory, Resident, Want, planned
from services.scheduler.domain.warmth.queueing import Traffic
from services.scheduler.domain.warmth.replicas import Promise, Wanted, adjusted, gain_per_ms, needed
from services.scheduler.domain.warmth.value import ExpectedValue

NAME = "fleet"
DESCRIPTION = "GPUs for the ServeGen tenants at their promise: dedicated, LRU sharing, ours; growth of planning time"

MODELS_PER_GPU, SLOTS, LOAD_MS = 4, 8, 5_000
OUTPUT_MS, INPUT_MS = 20.0, 0.1
PROMISE = Promise(wait_ms=2_000, share=0.95)
DAYS, WARM_UP_MS = 1.5, 43_200_000
PLAN_EVERY_MS = 60_000
REPLICA_AFTER_MS = (
    1_000  # LRU sharing loads another replica when the oldest request has waited so long: half the promise
)
RATE_HALF_LIFE_MS = 300_000
MIB = 1 << 20


@dataclass(slots=True)
class Instance:
    """A model in one of the places."""

    model: int
    ready_ms: int
    busy: int = 0


@dataclass(slots=True)
class Outcome:
    """What the counted day showed."""

    requests: int = 0
    on_time: int = 0
    loads: int = 0
    prewarms: int = 0
    plan_s: float = 0.0

    @property
    def kept(self) -> float:
        """Share of the requests that started in time."""
        return self.on_time / max(1, self.requests)


@dataclass(slots=True)
class Fleet:
    """Places, queues and events of one run; all models are of one size, so a place is a place."""

    places: int
    policy: EvictionPolicy
    service_ms: Sequence[float]
    chance: random.Random
    here: dict[int, list[Instance]] = field(default_factory=dict)
    held: int = 0
    queues: dict[int, deque[int]] = field(default_factory=dict)
    events: list[tuple[int, int, Instance, bool]] = field(default_factory=list)  # at, tie, instance, is a ready event
    ties: int = 0
    now_ms: int = 0
    outcome: Outcome = field(default_factory=Outcome)

    def arrive(self, access: Access) -> None:
        """A request comes, and starts at once if a slot is open."""
        self.advance(access.at_ms)
        self.policy.record(Use(_key(access.model), access.at_ms))
        self.queues.setdefault(access.model, deque()).append(access.at_ms)
        self._start(access.model)
        self._demand(access.model)

    def advance(self, until_ms: int) -> None:
        """Play loads and ends up to a time."""
        while self.events and self.events[0][0] <= until_ms:
            self.now_ms, _, instance, ready = heapq.heappop(self.events)
            if not ready:
                instance.busy -= 1
            self._start(instance.model)
            if not ready:
                self._make_room()
        self.now_ms = until_ms

    def load(self, model: int) -> bool:
        """Begin a load, in place of the least valuable idle model if all places are held; False if none is idle."""
        if self.held >= self.places:
            idle = self._idle()
            if not idle:
                return False
            self.drop(min(idle, key=lambda each: (self._worth(each), each.model)))
        instance = Instance(model, self.now_ms + LOAD_MS)
        self.here.setdefault(model, []).append(instance)
        self.held += 1
        self._event(instance.ready_ms, instance, ready=True)
        self.outcome.loads += self.now_ms >= WARM_UP_MS
        return True

    def drop(self, instance: Instance) -> None:
        """Unload an idle instance."""
        self.here[instance.model].remove(instance)
        self.held -= 1

    def _idle(self) -> list[Instance]:
        return [
            each
            for model, some in self.here.items()
            if not self.queues.get(model)
            for each in some
            if not each.busy and each.ready_ms <= self.now_ms
        ]

    def _worth(self, instance: Instance) -> float:
        version = _key(instance.model)
        spare = len(self.here[instance.model]) > 1
        worth = self.policy.worth(Candidate(version, MIB, LOAD_MS, instance.ready_ms), self.now_ms)
        return -math.inf if spare else worth  # a second replica that idles goes first, under both policies

    def _start(self, model: int) -> None:
        queue = self.queues.get(model)
        for instance in self.here.get(model, ()):
            while queue and instance.ready_ms <= self.now_ms and instance.busy < SLOTS:
                came_ms = queue.popleft()
                instance.busy += 1
                if came_ms >= WARM_UP_MS:
                    self.outcome.requests += 1
                    self.outcome.on_time += self.now_ms - came_ms <= PROMISE.wait_ms
                self._event(self.now_ms + int(self.chance.expovariate(1 / self.service_ms[model])), instance, False)

    def _demand(self, model: int) -> None:
        """Load what waits: cold, or all replicas full for long."""
        queue, some = self.queues.get(model), self.here.get(model, [])
        if not queue or any(each.ready_ms > self.now_ms for each in some):
            return
        if not some or self.now_ms - queue[0] >= REPLICA_AFTER_MS:
            self.load(model)

    def _make_room(self) -> None:
        """An instance may have become idle: the oldest cold demand gets its turn."""
        waiting = [(queue[0], model) for model, queue in self.queues.items() if queue and not self.here.get(model)]
        if waiting and self._idle():
            self._demand(min(waiting)[1])

    def _event(self, at_ms: int, instance: Instance, ready: bool) -> None:
        self.ties += 1
        heapq.heappush(self.events, (at_ms, self.ties, instance, ready))


@dataclass(slots=True)
class Planner:
    """Once a minute: rates, replicas, the plan; it starts what the plan says."""

    fleet: Fleet
    forecaster: Forecaster
    wants: dict[int, Wanted] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)  # per ms
    arrived: dict[int, int] = field(default_factory=dict)

    def note(self, model: int) -> None:
        """A request came."""
        self.arrived[model] = self.arrived.get(model, 0) + 1

    def plan(self) -> None:
        """Plan and act."""
        fleet, keep = self.fleet, 0.5 ** (PLAN_EVERY_MS / RATE_HALF_LIFE_MS)
        for model in self.rates.keys() | self.arrived.keys():
            seen = self.arrived.get(model, 0) / PLAN_EVERY_MS
            self.rates[model] = keep * self.rates.get(model, seen) + (1 - keep) * seen
        self.arrived.clear()
        started = time.perf_counter()
        residents = tuple(
            Resident(_key(model, place), MIB, each.busy > 0 or each.ready_ms > fleet.now_ms or place > 0)
            for model, some in fleet.here.items()
            for place, each in enumerate(some)
        )
        wants = [self._want(model) for model in self.rates]
        found = planned([NodeMemory(NodeId("pool"), fleet.places * MIB, residents)], wants)
        fleet.outcome.plan_s += time.perf_counter() - started
        for move in found.moves:
            leaving = [each for version in move.unload for each in fleet.here.get(_model(version), ())]
            if any(each.busy or each.ready_ms > fleet.now_ms for each in leaving):
                continue
            for each in leaving:
                fleet.drop(each)
            if fleet.held < fleet.places and fleet.load(_model(move.version)):
                fleet.outcome.prewarms += fleet.now_ms >= WARM_UP_MS

    def _want(self, model: int) -> Want:
        """The first replica by forecast; further ones are wanted as models of their own: one pool is one node here."""
        fleet, version = self.fleet, _key(model)
        traffic = Traffic(self.rates[model], fleet.service_ms[model])
        self.wants[model] = adjusted(self.wants.get(model, Wanted(0)), traffic, SLOTS, PROMISE, fleet.now_ms)
        worth = self.forecaster.worth_per_ms(version, fleet.now_ms) * LOAD_MS
        return Want(version, MIB, (worth,))

    def replicas(self) -> None:
        """Begin the second and further replicas that are wanted; they take the place of what is worth least."""
        for model, wanted in self.wants.items():
            some = self.fleet.here.get(model, [])
            if 0 < len(some) < wanted.replicas and all(each.ready_ms <= self.fleet.now_ms for each in some):
                self.fleet.load(model)


def play(accesses: Sequence[Access], service_ms: Sequence[float], gpus: int, ours: bool) -> Outcome:
    """One run."""
    forecaster = Forecaster()
    policy: EvictionPolicy = ExpectedValue(forecaster) if ours else LeastRecentlyUsed()
    fleet = Fleet(gpus * MODELS_PER_GPU, policy, service_ms, random.Random(1))
    planner = Planner(fleet, forecaster) if ours else None
    next_ms = PLAN_EVERY_MS
    for access in accesses:
        while planner is not None and access.at_ms >= next_ms:
            fleet.advance(next_ms)
            planner.plan()
            planner.replicas()
            next_ms += PLAN_EVERY_MS
        fleet.arrive(access)
        if planner is not None:
            planner.note(access.model)
    fleet.advance(accesses[-1].at_ms + 600_000)
    return fleet.outcome


def least(accesses: Sequence[Access], service_ms: Sequence[float], ours: bool) -> tuple[int, Outcome]:
    """The fewest GPUs that keep the promise, by bisection: more memory never keeps it less, but for noise."""
    low, high, best = 1, 64, Outcome()
    while low < high:
        middle = (low + high) // 2
        found = play(accesses, service_ms, middle, ours)
        if found.kept >= PROMISE.share:
            high, best = middle, found
        else:
            low = middle + 1
    return high, best


def dedicated(accesses: Sequence[Access], service_ms: Sequence[float]) -> int:
    """GPUs if every tenant has its own, for its busiest window."""
    counts: dict[tuple[int, int], int] = {}
    for access in accesses:
        key = (access.model, access.at_ms // WINDOW_MS)
        counts[key] = counts.get(key, 0) + 1
    busiest: dict[int, int] = {}
    for (model, _), count in counts.items():
        busiest[model] = max(busiest.get(model, 0), count)
    slots = SLOTS * MODELS_PER_GPU
    return sum(needed(Traffic(n / WINDOW_MS, service_ms[model]), slots, PROMISE) for model, n in busiest.items())


def planning_ms(models: int) -> float:
    """Time of one plan: forecasts' worth, replicas, and moves for this many models on a tenth as many places."""
    chance, forecaster = random.Random(1), Forecaster()
    for model in range(models):
        at_ms = 0
        for _ in range(20):
            at_ms += int(chance.expovariate(1 / (60_000 * (1 + model % 50))))
            forecaster.record(_key(model), at_ms)
    nodes = [
        NodeMemory(NodeId(f"n{node}"), MODELS_PER_GPU * MIB, tuple(_residents(node, models)))
        for node in range(max(2, models // 40))
    ]

    def once(now_ms: int) -> float:
        started, wants = time.perf_counter(), []
        for model in range(models):
            traffic = Traffic(1e-3 / (1 + model % 50), 3_000)
            wanted = adjusted(Wanted(0), traffic, SLOTS, PROMISE, now_ms)
            gains = [gain_per_ms(traffic, SLOTS, place, LOAD_MS) for place in range(2, wanted.replicas + 1)]
            first = forecaster.worth_per_ms(_key(model), now_ms) * LOAD_MS
            wants.append(Want(_key(model), MIB, tuple(sorted([first, *gains], reverse=True))))
        planned(nodes, wants)
        return (time.perf_counter() - started) * 1000

    once(10**8)  # laws are made once after an arrival, not at every plan
    return min(once(10**8 + shift) for shift in range(3))


def _residents(node: int, models: int) -> list[Resident]:
    return [Resident(_key((node * MODELS_PER_GPU + place) % models), MIB) for place in range(MODELS_PER_GPU)]


def _key(model: int, replica: int = 0) -> VersionKey:
    return VersionKey(f"m{model}@{replica}")


def _model(version: VersionKey) -> int:
    return int(version[1:].partition("@")[0])


def run(arguments: Sequence[str]) -> Report:
    """Both parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fleet")
    data_option(parser)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of all tenants together, on average")
    options = parser.parse_args(arguments)
    require(options.data, SERVEGEN_LOAD, SERVEGEN_LENGTHS)
    chosen = tenants(options.data / SERVEGEN_LOAD, windows_least=2016)
    accesses = thinned(chosen, DAYS, options.rate, seed=1)
    service_ms = _service(chosen_names=[tenant.name for tenant in chosen], path=options.data / SERVEGEN_LENGTHS)
    figures: dict[str, Figure] = {
        "tenants_active": len({access.model for access in accesses}),
        "requests": len(accesses),
        "requests_in_progress_mean": round(sum(service_ms[each.model] for each in accesses) / (DAYS * 86_400_000), 2),
        "gpus_dedicated": dedicated(accesses, service_ms),
    }
    with ProcessPoolExecutor() as pool:
        lru, ours = pool.map(least, [accesses] * 2, [service_ms] * 2, [False, True])
    same = play(accesses, service_ms, ours[0], ours=False)
    figures |= _figures("lru", *lru) | _figures("ours", *ours) | _figures("lru_with_gpus_of_ours", ours[0], same)
    plans = round(DAYS * 86_400_000 / PLAN_EVERY_MS)
    figures["plan_ms_mean_in_the_run"] = round(ours[1].plan_s / plans * 1000, 2)
    times = {models: planning_ms(models) for models in (10, 100, 1_000, 10_000)}
    figures |= {f"plan_ms_{models}_models": round(took, 2) for models, took in times.items()}
    growth = times[10_000] / times[1_000]
    goals = [
        Goal.at_most("GPUs of ours / of LRU sharing", 1.0, ours[0] / lru[0]),
        Goal.at_most("GPUs of ours / dedicated", 0.5, ours[0] / figures_int(figures, "gpus_dedicated")),
        Goal.at_most("planning time, 10,000 models / 1,000 models", 15.0, growth),
    ]
    return Report(NAME, figures, {}, goals)


def figures_int(figures: dict[str, Figure], name: str) -> int:
    """A figure that is a whole number."""
    return int(figures[name])


def _figures(name: str, gpus: int, outcome: Outcome) -> dict[str, Figure]:
    return {
        f"gpus_{name}": gpus,
        f"{name}_on_time_share": round(outcome.kept, 4),
        f"{name}_loads": outcome.loads,
        f"{name}_prewarms": outcome.prewarms,
    }


def _service(chosen_names: Sequence[str], path: Path) -> list[float]:
    """Mean run time of each tenant's requests; tenants without lengths get the median."""
    lengths = mean_lengths(path)
    known = {
        name: INPUT_MS * lengths[name][0] + OUTPUT_MS * lengths[name][1] for name in chosen_names if name in lengths
    }
    middle = sorted(known.values())[len(known) // 2]
    return [max(50.0, known.get(name, middle)) for name in chosen_names]

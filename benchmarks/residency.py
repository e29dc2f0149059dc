"""How many requests meet a warm model, for every eviction policy and Belady's optimum, against slots.

The policies are the domain's own, asked through `choose`. Every request must be served, so a cold model is always
loaded (no policy may decline); Belady's rule evicts what is wanted farthest in the future, which nobody can know: it is
the bound. Mean wait counts the load alone. All models are of one size here, so bytes do not blur the comparison.
Constants of our policy were tuned on the first half of each trace; both halves are reported.
"""

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Figure, Goal, Report
from benchmarks.traces import (
    OWNERS_8H,
    POOL_24H,
    SERVEGEN_LOAD,
    Access,
    data_option,
    functions,
    minute_accesses,
    require,
    tenants,
    thinned,
)
from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.eviction import (
    Candidate,
    Chosen,
    EvictionPolicy,
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Use,
    choose,
)
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.value import ExpectedValue

NAME = "residency"
DESCRIPTION = "hits, cold loads and mean wait against slots: LRU, LFU, GDSF, ours, Belady's optimum"

GOAL = 0.95  # of the optimum's hits
RELOAD_MS = 5_000  # a guess for a 16 GB model from host memory: 3 GB/s
POPULARITY = (40, 25, 15, 10, 6, 4)
SKEWED_REQUESTS = 5_000
LITERATURE_LRU_COLD = (3651, 2518, 1555, 839, 337, 6)
PLAIN = ("skewed", "cyclic")
SLOTS = {
    "pool_24h": (100, 200, 400),
    "owners_8h": (25, 50, 100, 200),
    "servegen": (10, 25, 50, 100),
    "skewed": (1, 2, 3, 4, 5, 6),
    "cyclic": (3,),
}
NEVER_MS = 1 << 60


@dataclass(slots=True)
class Tally:
    """What one policy did in one half of a trace."""

    accesses: int = 0
    hits: int = 0
    requests: float = 0.0
    warm_requests: float = 0.0

    @property
    def cold(self) -> int:
        """Loads."""
        return self.accesses - self.hits

    def count(self, access: Access, warm: bool) -> None:
        """One access; of its requests only the first can be cold."""
        self.accesses += 1
        self.hits += warm
        self.requests += access.requests
        self.warm_requests += access.requests if warm else max(0.0, access.requests - 1)

    def plus(self, other: "Tally") -> "Tally":
        """Both together."""
        return Tally(
            self.accesses + other.accesses,
            self.hits + other.hits,
            self.requests + other.requests,
            self.warm_requests + other.warm_requests,
        )


@dataclass(slots=True)
class Belady:
    """The optimum: the model whose next access is farthest leaves. It is told the future."""

    future: dict[VersionKey, list[int]]
    name: str = "belady"

    def record(self, use: Use) -> None:
        """See `EvictionPolicy`."""
        self.future[use.version].pop()

    def evicted(self, candidate: Candidate, now_ms: int) -> None:
        """See `EvictionPolicy`."""

    def worth(self, candidate: Candidate, now_ms: int) -> float:
        """See `EvictionPolicy`."""
        left = self.future[candidate.version]
        return -left[-1] if left else -NEVER_MS

    def explain(self, candidate: Candidate, now_ms: int) -> str:
        """See `EvictionPolicy`."""
        return "known future"


def future_of(accesses: Sequence[Access]) -> dict[VersionKey, list[int]]:
    """The places in the trace of every model's accesses, last first."""
    future: dict[VersionKey, list[int]] = {}
    for place in range(len(accesses) - 1, -1, -1):
        future.setdefault(_key(accesses[place].model), []).append(place)
    return future


@dataclass(slots=True)
class Memory:
    """Slots of one size, filled by demand."""

    policy: EvictionPolicy
    slots: int
    resident: dict[VersionKey, Candidate] = field(default_factory=dict)

    def access(self, access: Access) -> bool:
        """Whether the model was warm; it is afterwards."""
        version = _key(access.model)
        self.policy.record(Use(version, access.at_ms))
        if version in self.resident:
            return True
        if len(self.resident) >= self.slots:
            chosen = choose(self.policy, self.resident.values(), 1, access.at_ms, least_ms=0)
            assert isinstance(chosen, Chosen)
            for victim in chosen.victims:
                del self.resident[victim.candidate.version]
        self.resident[version] = Candidate(version, 1, RELOAD_MS, access.at_ms)
        return False


def play(accesses: Sequence[Access], policy: EvictionPolicy, slots: int) -> tuple[Tally, Tally]:
    """The tallies of the first and the second half of the time."""
    memory, middle_ms = Memory(policy, slots), (accesses[0].at_ms + accesses[-1].at_ms) // 2
    halves = (Tally(), Tally())
    for access in accesses:
        halves[access.at_ms >= middle_ms].count(access, memory.access(access))
    return halves


def policies(accesses: Sequence[Access]) -> list[EvictionPolicy]:
    """A new one of each."""
    return [
        LeastRecentlyUsed(),
        LeastFrequentlyUsed(),
        GreedyDualSizeFrequency(),
        ExpectedValue(Forecaster()),
        Belady(future_of(accesses)),
    ]


def skewed(seed: int) -> list[Access]:
    """5,000 independent requests, one every two seconds, of six models."""
    chance = random.Random(seed)
    models = chance.choices(range(len(POPULARITY)), POPULARITY, k=SKEWED_REQUESTS)
    return [Access(2_000 * place, model) for place, model in enumerate(models)]


def cyclic() -> list[Access]:
    """Four models in turn, one every ten seconds."""
    return [Access(10_000 * place, place % 4) for place in range(4_000)]


def _key(model: int) -> VersionKey:
    return VersionKey(f"m{model}@1")


@dataclass(frozen=True, slots=True)
class Job:
    """One workload at one size. `near_optimum`: the goal against Belady holds here."""

    name: str
    slots: int
    near_optimum: bool


def accesses_of(name: str, data: Path) -> list[Access]:
    """A workload by its name."""
    match name:
        case "skewed":
            return skewed(seed=1)
        case "cyclic":
            return cyclic()
        case "owners_8h":
            return minute_accesses(functions(data / OWNERS_8H), 2, seed=1)
        case "pool_24h":
            return minute_accesses(functions(data / POOL_24H), 1, seed=1)
        case _:
            return thinned(tenants(data / SERVEGEN_LOAD, windows_least=2016), days=4, a_second=0.2, seed=1)


def measure(job: Job, data: Path) -> tuple[dict[str, Figure], list[Goal]]:
    """Play all policies."""
    accesses = accesses_of(job.name, data)
    found = {policy.name: play(accesses, policy, job.slots) for policy in policies(accesses)}
    whole = {policy: first.plus(second) for policy, (first, second) in found.items()}
    figures: dict[str, Figure] = {f"{job.name}_accesses": len(accesses)}
    for policy, tally in whole.items():
        stem = f"{job.name}_{job.slots}_{policy}"
        figures[f"{stem}_hit_share"] = round(tally.hits / tally.accesses, 4)
        figures[f"{stem}_cold_loads"] = tally.cold
        figures[f"{stem}_wait_ms_mean"] = round(tally.cold * RELOAD_MS / tally.requests, 2)
        if job.near_optimum:
            figures[f"{stem}_hits_of_optimum_first_half"] = _share(found, policy, 0)
            figures[f"{stem}_hits_of_optimum_second_half"] = _share(found, policy, 1)
    where = f"{job.name}, {job.slots} slots"
    goals = [Goal.at_least(f"{where}: hits of ours / LRU's", 1.0, _ratio(whole, "lru"))]
    if job.near_optimum:
        requests = whole["value"].warm_requests / whole["belady"].warm_requests
        goals.append(Goal.at_least(f"{where}: hits / optimum's", GOAL, _ratio(whole, "belady")))
        goals.append(Goal.at_least(f"{where}: warm requests / optimum's", GOAL, requests))
    return figures, goals


def _share(found: dict[str, tuple[Tally, Tally]], policy: str, half: int) -> float:
    return round(found[policy][half].hits / max(1, found["belady"][half].hits), 4)


def _ratio(whole: dict[str, Tally], other: str) -> float:
    return whole["value"].hits / max(1, whole[other].hits) if whole[other].hits else 1.0 + whole["value"].hits


def run(arguments: Sequence[str]) -> Report:
    """Play every workload at every size, on all cores."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks residency")
    data_option(parser)
    parser.add_argument("--only", nargs="+", choices=SLOTS, default=list(SLOTS), help="workloads")
    options = parser.parse_args(arguments)
    require(options.data, OWNERS_8H, POOL_24H, SERVEGEN_LOAD)
    jobs = [Job(name, slots, name not in PLAIN) for name in options.only for slots in reversed(SLOTS[name])]
    figures: dict[str, Figure] = {}
    goals: list[Goal] = []
    if "skewed" in options.only:
        for slots, cold in enumerate(LITERATURE_LRU_COLD, start=1):
            figures[f"skewed_{slots}_lru_cold_loads_in_literature"] = cold
    with ProcessPoolExecutor() as pool:
        for some, reached in pool.map(measure, jobs, [options.data] * len(jobs)):
            figures.update(some)
            goals.extend(reached)
    return Report(NAME, figures, {}, goals)

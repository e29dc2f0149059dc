"""What each pool's past says about its future: forecasts, worth of places, replicas wanted, and pre-warms.

It counts what this replica sees, tells it to the shared history about once a second and learns from the whole of it, so
all replicas forecast alike and a new one begins with the past. It moves nothing: `residency.py` asks it for the worth
of victims and for loads that would pay, and begins those only while no request waits for a load.
"""

from dataclasses import dataclass, field

import structlog

from roundhouse.catalogue.records import Model
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import ModelName, NodeId, PoolName
from services.scheduler.domain.nodes import ARRIVING, InstanceView, NodeView, Residence, Role, VersionSpec
from services.scheduler.domain.placement import Load, PoolView, Victim, Worth, retry_at_ms
from services.scheduler.domain.records import PREFILL_STAGE, VersionKey, instance_key, model_of, owner_of
from services.scheduler.domain.warmth.activity import Activity
from services.scheduler.domain.warmth.autoscale import ModelSignal, PoolSignal, ThrashMeter, pool_signal
from services.scheduler.domain.warmth.eviction import (
    MIB,
    RESIDENCE_LEAST_MS,
    Candidate,
    EvictionPolicy,
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Use,
)
from services.scheduler.domain.warmth.forecast import Explanation, Forecaster
from services.scheduler.domain.warmth.history import Entry, Gathering, Happened
from services.scheduler.domain.warmth.memory_plan import Move, NodeMemory, Resident, Want, planned
from services.scheduler.domain.warmth.replicas import Promise, Wanted, adjusted, gain_per_ms
from services.scheduler.domain.warmth.value import ExpectedValue
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import History, Instruments

log = structlog.get_logger(__name__)

PLAN_EVERY_MS = 5_000  # a plan for 1,000 models takes 15 ms (`python -m benchmarks fleet`): 0.3 % of a core
PREWARM_LEAST_PER_MINUTE = 0.1  # arrivals served warm in a minute of the place below which no load is begun: a guess
DISK_BYTES_PER_MS = 2_000_000  # 2 GB/s from NVMe: a load nobody has seen yet
LOAD_LEAST_MS = 200  # an empty model takes so long on Triton
HELD = frozenset({*ARRIVING, Residence.DRAINING, Residence.UNLOADING})
PIECES_MOST = 128  # reads of one turn: the rest of a long past comes with the next


@dataclass(slots=True)
class PoolMind:
    """What is known of one pool. Mutable; owned by `Foresight`."""

    policy: EvictionPolicy
    forecaster: Forecaster
    activity: Activity = field(default_factory=Activity)
    gathering: Gathering = field(default_factory=Gathering)
    thrash: ThrashMeter = field(default_factory=ThrashMeter)
    cursor: str = ""
    wanted: dict[VersionKey, Wanted] = field(default_factory=dict)
    ready: set[VersionKey] = field(default_factory=set)
    plan_at_ms: int = 0

    def learn(self, entry: Entry) -> None:
        """Take one entry of the history in."""
        self.activity.observe(entry)
        for version, happened in entry.versions.items():
            if happened.arrivals:
                self.forecaster.record(version, entry.at_ms)
                if not isinstance(self.policy, ExpectedValue):  # which shares the forecaster
                    self.policy.record(Use(version, entry.at_ms))


class Foresight:
    """The minds of all pools of one process."""

    def __init__(
        self, history: History, pools: Pools, clock: Clock, instruments: Instruments, *, policy: str, prewarm: bool
    ) -> None:
        self._history = history
        self._pools = pools
        self._clock = clock
        self._instruments = instruments
        self._policy = policy
        self._prewarm = prewarm
        self._minds: dict[PoolName, PoolMind] = {}

    def mind(self, pool: PoolName) -> PoolMind:
        """What is known of a pool."""
        if pool not in self._minds:
            forecaster = Forecaster()
            self._minds[pool] = PoolMind(_policy(self._policy, forecaster), forecaster)
        return self._minds[pool]

    def arrived(self, pool: PoolName, version: VersionKey) -> None:
        """A request for a version was queued."""
        self.mind(pool).gathering.add(version, Happened(arrivals=1))

    def granted(self, pool: PoolName, version: VersionKey, wait_ms: int) -> None:
        """A request got its slot."""
        self.mind(pool).gathering.add(version, Happened(granted=1, wait_ms=max(0, wait_ms)))

    def ended(self, pool: PoolName, version: VersionKey, run_ms: int) -> None:
        """A request ended on its instance."""
        self.mind(pool).gathering.add(version, Happened(ended=1, run_ms=max(0, run_ms)))

    async def turn(self) -> None:
        """Tell and hear, for all pools. A store that is away is tried again at the next turn; nothing is lost."""
        for pool in sorted(self._pools.names()):
            try:
                await self._exchange(pool)
            except Unavailable as error:
                log.warning("history_waits", pool=pool, reason=error.message)

    async def _exchange(self, pool: PoolName) -> None:
        mind = self.mind(pool)
        entry = mind.gathering.close(self._clock.now_ms())
        if entry is not None:
            try:
                await self._history.append(pool, entry)
            except Unavailable:
                mind.gathering.put_back(entry)
                raise
        for _ in range(PIECES_MOST):
            entries, mind.cursor = await self._history.after(pool, mind.cursor)
            for each in entries:
                mind.learn(each)
            if not entries:
                return

    def worth(self, pool: PoolName) -> Worth:
        """What is lost if an instance of a pool leaves, as of now."""
        policy, now_ms = self.mind(pool).policy, self._clock.now_ms()
        return lambda instance, used_ms: (policy.worth(_candidate(instance), now_ms), used_ms)

    def explain_victim(self, pool: PoolName, node: NodeView, version: VersionKey, now_ms: int) -> str:
        """Why this one left, for the audit stream."""
        instance, mind = node.find(version), self.mind(pool)
        if instance is None:
            return "its instance has gone"
        if version not in self._pools.specs(pool):
            return "an old version"
        return f"{mind.policy.name}: {mind.policy.explain(_candidate(instance), now_ms)}"

    def evicted(self, pool: PoolName, node: NodeView, version: VersionKey, now_ms: int) -> None:
        """An instance left by this process's choice."""
        instance = node.find(version)
        if instance is not None:
            self.mind(pool).policy.evicted(_candidate(instance), now_ms)

    def explain(self, pool: PoolName, version: VersionKey) -> Explanation | None:
        """The forecast of one version with its reasons; None for one that was never wanted."""
        return self.mind(pool).forecaster.explain(version, self._clock.now_ms())

    def expected(self, pool: PoolName) -> list[tuple[float, VersionKey]]:
        """Arrivals served warm in a minute of a place in memory from now on, the most first."""
        mind, now_ms = self.mind(pool), self._clock.now_ms()
        worths = [(60_000 * mind.forecaster.worth_per_ms(each, now_ms), each) for each in mind.forecaster.models]
        return sorted(worths, key=lambda each: (-each[0], each[1]))

    def signals(self, pool: PoolName) -> PoolSignal:
        """What an autoscaler needs to know, as of now."""
        view, mind, now_ms = self._pools.view(pool), self.mind(pool), self._clock.now_ms()
        healthy = [node for node in view.nodes if node.healthy]
        models = [self._model_signal(view, mind, spec, now_ms) for _, spec in sorted(view.specs.items())]
        bytes_per_node = max((node.device_capacity for node in healthy), default=0)
        return pool_signal(models, len(healthy), max(1, bytes_per_node), mind.thrash.index(now_ms))

    def moves(self, view: PoolView, pool: PoolName) -> tuple[Load, ...]:
        """Loads that would pay now, in order; empty until the next plan is due. Also brings the replicas up to date."""
        mind, now_ms = self.mind(pool), self._clock.now_ms()
        if now_ms < mind.plan_at_ms:
            return ()
        mind.plan_at_ms = now_ms + PLAN_EVERY_MS
        mind.activity.forget(now_ms)
        self._watch_ready(view, mind, now_ms)
        for version in mind.forecaster.models.keys() - view.specs.keys():
            mind.forecaster.forget(version)
        moves = self._plan(view, mind, now_ms)
        self._instruments.planned(pool, self.signals(pool))
        if not self._prewarm:
            return ()
        nodes = {node.node_id: node for node in view.nodes}
        return tuple(_load(move) for move in moves if self._pays(view, mind, nodes[move.node_id], move, now_ms))

    def plan_again(self, pool: PoolName) -> None:
        """The next call of `moves` plans, whenever it comes: what was planned last has begun."""
        self.mind(pool).plan_at_ms = 0

    def _plan(self, view: PoolView, mind: PoolMind, now_ms: int) -> tuple[Move, ...]:
        """One plan for the nodes that run prompts only, one for all others: what stands there is not the same."""
        awaited = {depth.version for depth in view.state.depths}
        mind.wanted = {version: each for version, each in mind.wanted.items() if version in view.specs}
        moves = list[Move]()
        for prefill in (False, True):
            nodes = [
                _memory(view, node, awaited, now_ms)
                for node in view.nodes
                if node.healthy and (node.role is Role.PREFILL) == prefill
            ]
            specs = [spec for spec in view.specs.values() if (owner_of(spec.version) == PREFILL_STAGE) == prefill]
            if nodes and specs:
                moves += planned(nodes, [self._want(view, mind, spec, now_ms) for spec in specs]).moves
        return tuple(moves)

    def _want(self, view: PoolView, mind: PoolMind, spec: VersionSpec, now_ms: int) -> Want:
        model, reload_ms = self._model(spec), expected_load_ms(view, spec)
        slots = model.slots if model else 1
        traffic = mind.activity.traffic(spec.version, now_ms)
        promise = Promise(model.ttft_slo_ms if model else 2_000)
        before = mind.wanted.get(spec.version, Wanted(0))
        wanted = mind.wanted[spec.version] = adjusted(before, traffic, slots, promise, now_ms)
        per_mib = MIB / max(1, spec.device_bytes)
        first = mind.forecaster.worth_per_ms(spec.version, now_ms) * reload_ms * per_mib
        more = [
            gain_per_ms(traffic, slots, place, reload_ms) * per_mib
            for place in range(2, min(wanted.replicas, len(view.nodes)) + 1)
        ]
        return Want(spec.version, spec.device_bytes, tuple(sorted([first, *more], reverse=True)), spec.replicas_wanted)

    def _pays(self, view: PoolView, mind: PoolMind, node: NodeView, move: Move, now_ms: int) -> bool:
        """Whether a move of the plan is worth its load, and may be begun."""
        claim = view.state.loads.get(move.version)
        if claim is not None and claim.until_ms > now_ms:
            return False
        if any(version == move.version for version, _ in view.state.failures):
            return False  # only a request is worth another try of what failed
        if retry_at_ms(view.state, node, move.version) > now_ms:
            return False
        spec = view.specs[move.version]
        here = sum(each.healthy and each.find(move.version) is not None for each in view.nodes)
        if here < spec.replicas_wanted:
            return False  # placement brings pins and minimum replicas
        if here:
            return True  # a further replica that the promise needs
        return mind.forecaster.worth_per_ms(move.version, now_ms) * 60_000 >= PREWARM_LEAST_PER_MINUTE

    def _watch_ready(self, view: PoolView, mind: PoolMind, now_ms: int) -> None:
        """Loads and evictions as the nodes show them, whoever asked for them."""
        ready = {
            each.version for node in view.nodes for each in node.instances if each.residence is Residence.READY
        } & view.specs.keys()
        for version in ready - mind.ready:
            mind.thrash.loaded(version, expected_load_ms(view, view.specs[version]), now_ms)
        for version in mind.ready - ready:
            mind.thrash.evicted(version, now_ms)
        mind.ready = ready

    def _model_signal(self, view: PoolView, mind: PoolMind, spec: VersionSpec, now_ms: int) -> ModelSignal:
        wanted, model = mind.wanted.get(spec.version, Wanted(0)), self._model(spec)
        replicas = sum(
            each.version == spec.version and each.residence is Residence.READY
            for node in view.nodes
            if node.healthy
            for each in node.instances
        )
        reload_ms = expected_load_ms(view, spec)
        worth = mind.forecaster.worth_per_ms(spec.version, now_ms) * reload_ms * MIB / max(1, spec.device_bytes)
        floor = spec.replicas_wanted
        return ModelSignal(
            version=spec.version,
            bytes=spec.device_bytes,
            rate_per_s=mind.activity.traffic(spec.version, now_ms).rate_per_ms * 1000,
            wait_ms_mean=mind.activity.wait_ms(spec.version, now_ms),
            promise_ms=model.ttft_slo_ms if model else 0,
            replicas=replicas,
            replicas_wanted=max(wanted.replicas, floor),
            reason=wanted.reason if wanted.replicas >= floor else "pinned, or a minimum of replicas",
            value_per_mib_s=worth * 1000,
            cold_loads_per_hour=float(mind.thrash.loads_per_hour(spec.version)),
            cold_load_ms=reload_ms,
        )

    def _model(self, spec: VersionSpec) -> Model | None:
        return self._pools.catalogue.current.models.get(ModelName(model_of(spec.version)))


def expected_load_ms(view: PoolView, spec: VersionSpec) -> int:
    """What the last load of a version took on any node of its pool; else its bytes at NVMe speed."""
    found = (node.find(spec.version) for node in view.nodes)
    took = [each.stage_ms + each.load_ms for each in found if each is not None and each.load_ms]
    return max(LOAD_LEAST_MS, min(took, default=spec.device_bytes // DISK_BYTES_PER_MS))


def _policy(name: str, forecaster: Forecaster) -> EvictionPolicy:
    match name:
        case "lru":
            return LeastRecentlyUsed()
        case "lfu":
            return LeastFrequentlyUsed()
        case "gdsf":
            return GreedyDualSizeFrequency()
        case _:
            return ExpectedValue(forecaster)


def _candidate(instance: InstanceView) -> Candidate:
    reload_ms = max(LOAD_LEAST_MS, instance.stage_ms + instance.load_ms)
    return Candidate(instance.version, max(1, instance.device_bytes), reload_ms, instance.since_ms)


def _memory(view: PoolView, node: NodeView, awaited: set[VersionKey], now_ms: int) -> NodeMemory:
    residents = tuple(
        Resident(each.version, each.device_bytes, _is_held(view, node.node_id, each, awaited, now_ms))
        for each in node.instances
        if each.residence is Residence.READY or each.residence in HELD
    )
    return NodeMemory(node.node_id, node.device_capacity, residents)


def _is_held(view: PoolView, node_id: NodeId, instance: InstanceView, awaited: set[VersionKey], now_ms: int) -> bool:
    key = instance_key(node_id, instance.version)
    mark = view.state.drains.get(key)
    return (
        instance.residence is not Residence.READY
        or instance.version in awaited
        or bool(view.state.in_use.get(key, 0))
        or (mark is not None and mark.until_ms > now_ms)
        or now_ms - instance.since_ms < RESIDENCE_LEAST_MS
    )


def _load(move: Move) -> Load:
    victims = tuple(Victim(instance_key(move.node_id, version), version) for version in move.unload)
    return Load(move.version, move.node_id, move.bytes, victims, "prewarm")

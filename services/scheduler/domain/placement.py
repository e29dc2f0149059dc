"""Where models go: a pure function from a snapshot of one pool to loads, rotations and a reason for each deferral.

The oldest demand is placed first. A cold version goes to the node with most free device memory; else to the node where
the fewest idle instances must leave (of least worth first, never pinned ones, never one that is in use or waited
for: invariant 8); else it waits for a rotation. A rotation closes instances that have been ready for a quantum, lets
their running requests end and then gives their memory to the oldest demand; so a newly loaded model serves what waits
for it before it may be closed, and no demand starves (case B24). The quantum grows with the load time, which keeps the
part of time that loading takes at a third or less.

It decides nothing about requests: `FairQueue` does. It sends nothing: `operations/residency.py` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.nodes import ARRIVING, LEAVING, InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.records import BROKEN, InstanceKey, PoolState, VersionKey, instance_key


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """When a busy model makes room for a waiting one. Both times are guesses until measured under real mixes."""

    quantum_ms: int = 10_000  # a ready model keeps its place at least this long while it is used or waited for
    quantum_loads: int = 2  # and at least this many times the time its load took
    patience_ms: int = 2_000  # a cold demand waits this long for an instance to become idle by itself


Worth = Callable[[InstanceView, int], tuple[float, int]]
"""What is lost if an idle instance leaves, given when it was last used; only the order matters. See `domain/warmth`."""


def last_used(instance: InstanceView, used_ms: int) -> tuple[float, int]:
    """The worth that needs no history: the one used longest ago is worth least."""
    return 0.0, used_ms


@dataclass(frozen=True, slots=True)
class PoolView:
    """Everything a plan is made from."""

    nodes: tuple[NodeView, ...]
    state: PoolState
    specs: Mapping[VersionKey, VersionSpec]
    worth: Worth = last_used


@dataclass(frozen=True, slots=True)
class Victim:
    """An instance that may leave."""

    instance: InstanceKey
    version: VersionKey


@dataclass(frozen=True, slots=True)
class Load:
    """Have a version loaded on a node, after the victims have left."""

    version: VersionKey
    node_id: NodeId
    bytes: int
    victims: tuple[Victim, ...]
    reason: str  # "demand" or "prewarm": for the audit stream


@dataclass(frozen=True, slots=True)
class Rotate:
    """Close a busy instance for new grants, so that `purpose` gets its memory when the running requests have ended."""

    victim: Victim
    purpose: VersionKey


@dataclass(frozen=True, slots=True)
class Reopen:
    """Open an instance again: whoever wanted its memory wants it no longer."""

    instance: InstanceKey


@dataclass(frozen=True, slots=True)
class Deferred:
    """Why a waiting version gets nothing now."""

    version: VersionKey
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in order."""

    reopen: tuple[Reopen, ...] = ()
    loads: tuple[Load, ...] = ()
    rotations: tuple[Rotate, ...] = ()
    deferred: tuple[Deferred, ...] = ()


def plan(view: PoolView, policy: ResidencyPolicy, now_ms: int) -> Plan:
    """Decide for one pool. Deterministic; O(versions waiting × instances)."""
    return _Planner(view, policy, now_ms).plan()


@dataclass(slots=True)
class _Planner:
    """Working memory of one plan: what earlier decisions of the same plan have used up."""

    view: PoolView
    policy: ResidencyPolicy
    now_ms: int
    free: dict[NodeId, int] = field(default_factory=dict)
    oldest: dict[VersionKey, int] = field(default_factory=dict)
    closed: dict[InstanceKey, VersionKey] = field(default_factory=dict)  # instance → who gets its memory
    loads: list[Load] = field(default_factory=list)
    rotations: list[Rotate] = field(default_factory=list)

    def plan(self) -> Plan:
        state = self.view.state
        for depth in state.depths:
            self.oldest[depth.version] = min(depth.oldest_ms, self.oldest.get(depth.version, depth.oldest_ms))
        self.closed = {key: mark.purpose for key, mark in state.drains.items() if mark.until_ms > self.now_ms}
        reopen = self._reopen()
        self.free = {node.node_id: self._free(node) for node in self.view.nodes}
        demands = sorted(self.oldest, key=lambda version: (self.oldest[version], version))
        deferred = [Deferred(version, reason) for version in demands if (reason := self._place(version))]
        for version in sorted(self.view.specs):
            self._prewarm(self.view.specs[version])
        return Plan(tuple(reopen), tuple(self.loads), tuple(self.rotations), tuple(deferred))

    def _reopen(self) -> list[Reopen]:
        done = [
            key
            for key, purpose in self.closed.items()
            if purpose != BROKEN and not self._claimed(purpose) and not self._wants(purpose)
        ]
        for key in done:
            del self.closed[key]
        return [Reopen(key) for key in sorted(done)]

    def _wants(self, version: VersionKey) -> bool:
        return version in self.oldest and not self._here(version)

    def _free(self, node: NodeView) -> int:
        """Free bytes less those that a claimed load will take and the loader does not show yet."""
        coming = sum(
            claim.bytes
            for version, claim in self.view.state.loads.items()
            if claim.node_id == node.node_id and claim.until_ms > self.now_ms and not _holds(node, version)
        )
        return node.device_free - coming

    def _claimed(self, version: VersionKey) -> bool:
        claim = self.view.state.loads.get(version)
        return claim is not None and claim.until_ms > self.now_ms

    def _here(self, version: VersionKey) -> bool:
        """Whether an instance is ready and open on a healthy node, or on its way."""
        for node in self.view.nodes:
            found = node.find(version) if node.healthy else None
            if found is None:
                continue
            if found.residence in ARRIVING and retry_at_ms(self.view.state, node, version) <= self.now_ms:
                return True  # else: a load that was given up, such as one whose victims do not leave
            if found.residence is Residence.READY and instance_key(node.node_id, version) not in self.closed:
                return True
        return False

    def _place(self, version: VersionKey) -> str | None:
        """Place one waiting version; the reason if it must wait."""
        if self._here(version):
            return None
        if self._claimed(version):
            return "its load has begun"
        spec = self.view.specs.get(version)
        if spec is None:
            return "the catalogue does not have it any more"
        nodes = self._candidates(spec)
        if not nodes:
            return "no healthy node may load it now"
        for node in nodes:
            closing = [key for key, purpose in self.closed.items() if purpose == version and self._on(node, key)]
            if closing:
                return self._continue_rotation(spec, node, closing)
        if self._load_free(spec, nodes, "demand") or self._load_evicting(spec, nodes, "demand"):
            return None
        if self.now_ms - self.oldest[version] < self.policy.patience_ms:
            return "no memory is free and no instance is idle"
        return self._rotate(spec, nodes)

    def _candidates(self, spec: VersionSpec) -> list[NodeView]:
        return [
            node
            for node in self.view.nodes
            if node.healthy
            and node.device_capacity >= spec.device_bytes
            and not _leaves(node, spec.version)
            and not _holds(node, spec.version)
            and retry_at_ms(self.view.state, node, spec.version) <= self.now_ms
        ]

    def _load_free(self, spec: VersionSpec, nodes: list[NodeView], reason: str) -> bool:
        fitting = [node for node in nodes if self.free[node.node_id] >= spec.device_bytes]
        if not fitting:
            return False
        best = min(fitting, key=lambda node: (-self.free[node.node_id], node.node_id))
        self._load(spec, best, [], reason)
        return True

    def _load_evicting(self, spec: VersionSpec, nodes: list[NodeView], reason: str) -> bool:
        choices = []
        for node in nodes:
            chosen = self._just_enough(spec, node, [each for each in node.instances if self._is_idle(node, each)])
            if chosen is not None:
                dearest = max(self._worth(node, each) for each in chosen)
                choices.append((len(chosen), dearest, node.node_id, node, chosen))
        if not choices:
            return False
        *_, node, chosen = min(choices, key=lambda choice: choice[:3])
        self._load(spec, node, chosen, reason)
        return True

    def _just_enough(self, spec: VersionSpec, node: NodeView, leaving: list[InstanceView]) -> list[InstanceView] | None:
        """Those of least worth of `leaving` that make enough room, without any that is not needed (case B22)."""
        missing = spec.device_bytes - self.free[node.node_id]
        chosen: list[InstanceView] = []
        for each in sorted(leaving, key=lambda each: (self._worth(node, each), each.version)):
            if missing <= 0:
                break
            chosen.append(each)
            missing -= each.device_bytes
        if missing > 0:
            return None
        for each in list(chosen):
            if missing + each.device_bytes <= 0:
                chosen.remove(each)
                missing += each.device_bytes
        return chosen

    def _worth(self, node: NodeView, instance: InstanceView) -> tuple[float, int]:
        key = instance_key(node.node_id, instance.version)
        return self.view.worth(instance, self.view.state.used_ms.get(key, instance.since_ms))

    def _may_leave(self, node: NodeView, instance: InstanceView) -> bool:
        if instance.residence is not Residence.READY or instance_key(node.node_id, instance.version) in self.closed:
            return False
        spec = self.view.specs.get(instance.version)
        if spec is None:
            return True  # an old version
        return spec.replicas_wanted == 0 or self._replicas(instance.version) > spec.replicas_wanted

    def _is_idle(self, node: NodeView, instance: InstanceView) -> bool:
        key = instance_key(node.node_id, instance.version)
        used = self.view.state.in_use.get(key, 0) or instance.version in self.oldest
        return not used and self._may_leave(node, instance)

    def _replicas(self, version: VersionKey) -> int:
        there = sum(
            1
            for node in self.view.nodes
            if node.healthy and _holds(node, version) and self.closed.get(instance_key(node.node_id, version)) != BROKEN
        )
        claimed = self.view.state.loads.get(version)
        if claimed is not None and self._claimed(version):
            holder = next((node for node in self.view.nodes if node.node_id == claimed.node_id), None)
            there += holder is None or not _holds(holder, version)
        return there

    def _rotate(self, spec: VersionSpec, nodes: list[NodeView]) -> str:
        choices = []
        for node in nodes:
            leaving = [each for each in node.instances if self._may_leave(node, each) and self._is_over(each)]
            chosen = self._just_enough(spec, node, leaving)
            if chosen is not None:
                busy = sum(self._in_use(node, each) for each in chosen)
                choices.append((busy, len(chosen), node.node_id, node, chosen))
        if not choices:
            return "no memory is free; the models that hold it have not had their time yet"
        *_, node, chosen = min(choices, key=lambda choice: choice[:3])
        for each in chosen:
            self._close(Victim(instance_key(node.node_id, each.version), each.version), spec.version)
        return "the models that hold its memory finish what they run"

    def _is_over(self, instance: InstanceView) -> bool:
        took_ms = instance.stage_ms + instance.load_ms
        quantum_ms = max(self.policy.quantum_ms, self.policy.quantum_loads * took_ms)
        return self.now_ms - instance.since_ms >= quantum_ms

    def _in_use(self, node: NodeView, instance: InstanceView) -> int:
        return self.view.state.in_use.get(instance_key(node.node_id, instance.version), 0)

    def _continue_rotation(self, spec: VersionSpec, node: NodeView, closing: list[InstanceKey]) -> str | None:
        leaving = [
            each
            for each in node.instances
            if each.residence is Residence.READY and instance_key(node.node_id, each.version) in closing
        ]
        if any(self._in_use(node, each) for each in leaving):
            for each in leaving:
                self._close(Victim(instance_key(node.node_id, each.version), each.version), spec.version)
            return "the models that hold its memory finish what they run"
        if self.free[node.node_id] + sum(each.device_bytes for each in leaving) < spec.device_bytes:
            return self._rotate(spec, [node])
        self._load(spec, node, leaving, "demand")
        return None

    def _close(self, victim: Victim, purpose: VersionKey) -> None:
        self.rotations.append(Rotate(victim, purpose))
        self.closed[victim.instance] = purpose

    def _load(self, spec: VersionSpec, node: NodeView, leaving: list[InstanceView], reason: str) -> None:
        victims = tuple(Victim(instance_key(node.node_id, each.version), each.version) for each in leaving)
        self.loads.append(Load(spec.version, node.node_id, spec.device_bytes, victims, reason))
        for victim in victims:
            self.closed[victim.instance] = spec.version
        self.free[node.node_id] += sum(each.device_bytes for each in leaving) - spec.device_bytes

    def _prewarm(self, spec: VersionSpec) -> None:
        planned = any(load.version == spec.version for load in self.loads)
        if planned or self._claimed(spec.version) or self._replicas(spec.version) >= spec.replicas_wanted:
            return
        nodes = self._candidates(spec)
        if not self._load_free(spec, nodes, "prewarm"):
            self._load_evicting(spec, nodes, "prewarm")

    def _on(self, node: NodeView, key: InstanceKey) -> bool:
        return any(instance_key(node.node_id, each.version) == key for each in node.instances)


def _holds(node: NodeView, version: VersionKey) -> bool:
    found = node.find(version)
    return found is not None and (found.residence is Residence.READY or found.residence in ARRIVING)


def _leaves(node: NodeView, version: VersionKey) -> bool:
    found = node.find(version)
    return found is not None and found.residence in LEAVING


def retry_at_ms(state: PoolState, node: NodeView, version: VersionKey) -> int:
    """When a version may be tried on a node again: what replicas noted, or what its loader says; 0 = now."""
    failure = state.failures.get((version, node.node_id))
    found = node.find(version)
    said = found.retry_at_ms if found is not None and found.residence is Residence.FAILED else 0
    return max(failure.retry_at_ms if failure else 0, said)

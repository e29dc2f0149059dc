"""What a plan knows while it is made: the snapshot, what its decisions so far have used up, and questions about both.

Mutable; lives as long as one plan. It decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.candidates import Candidates
from services.scheduler.domain.nodes import ARRIVING, InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.plans import Deferred, Load, Parting, PoolView, ResidencyPolicy, Rotate
from services.scheduler.domain.pressure import LastUses
from services.scheduler.domain.records import BROKEN, InstanceKey, VersionKey, instance_key
from services.scheduler.domain.sites import Rooms, Site, is_held, retry_at_ms, sites, strangers


@dataclass(slots=True)
class Ground:
    """One plan's working memory."""

    view: PoolView
    policy: ResidencyPolicy
    now_ms: int
    candidates: Candidates = field(init=False)
    rooms: Rooms = field(default_factory=Rooms)
    oldest: dict[VersionKey, int] = field(default_factory=dict)
    closed: dict[InstanceKey, VersionKey] = field(default_factory=dict)  # instance → who gets its memory
    loads: list[Load] = field(default_factory=list)
    rotations: list[Rotate] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    busy: list[Deferred] = field(default_factory=list)
    promised: set[InstanceKey] = field(default_factory=set)  # to older demands, when they have had their time
    idle: dict[NodeId, list[InstanceView]] = field(default_factory=dict)
    uses: LastUses = field(default_factory=LastUses)
    given_up: dict[InstanceKey, VersionKey] = field(default_factory=dict)  # closed for what cannot use them as they are

    def is_claimed(self, version: VersionKey) -> bool:
        """Whether a load of this version has begun, by any replica."""
        claim = self.view.state.loads.get(version)
        return claim is not None and claim.until_ms > self.now_ms

    def is_here(self, version: VersionKey) -> bool:
        """Whether an instance is ready and open on a healthy node, or on its way."""
        holders = self.view.holders(version)
        return any(self.is_open(node, version) or self.arrives(node, version) for node in holders)

    def is_open(self, node: NodeView, version: VersionKey) -> bool:
        """Whether a node serves the version now."""
        found = node.find(version) if node.healthy else None
        if found is None or found.residence is not Residence.READY:
            return False
        return instance_key(node.node_id, version) not in self.closed

    def arrives(self, node: NodeView, version: VersionKey) -> bool:
        """Whether a node loads the version."""
        found = node.find(version) if node.healthy else None
        if found is None or found.residence not in ARRIVING:
            return False
        # Else it was given up, such as a load whose victims do not leave.
        return retry_at_ms(self.view.state, node, version) <= self.now_ms

    def keys(self, node: NodeView) -> list[InstanceKey]:
        """The keys of what a node lists, in its order."""
        return [instance_key(node.node_id, each.version) for each in node.instances]

    def closed_for(self, node: NodeView, version: VersionKey) -> list[InstanceView]:
        """Ready instances of a node that were closed for a version."""
        return [
            each
            for each, key in zip(node.instances, self.keys(node), strict=True)
            if each.residence is Residence.READY and self.closed.get(key) == version
        ]

    def sites_of(self, spec: VersionSpec, nodes: Sequence[NodeView]) -> list[Site]:
        """Where on these nodes a version could stand."""
        return [site for node in nodes for site in sites(node, spec, self.view)]

    def idle_on(self, node: NodeView) -> list[InstanceView]:
        """What may leave a node at once; looked for again when something there was closed."""
        found = self.idle.get(node.node_id)
        if found is None:
            found = self.idle[node.node_id] = [each for each in node.instances if self.is_idle(node, each)]
        return found

    def just_enough(self, spec: VersionSpec, site: Site, leaving: list[InstanceView]) -> list[InstanceView] | None:
        """Those of least worth that make room on a site; None if all do not, empty if none is needed."""

        def order(each: InstanceView) -> tuple[object, ...]:
            return (*self.worth_of(site.node, each), each.version)

        return self.rooms.just_enough(site, spec.share, leaving, order, strangers(site, spec))

    def worth_of(self, node: NodeView, instance: InstanceView) -> tuple[float, int]:
        """What is lost if an instance leaves."""
        key = instance_key(node.node_id, instance.version)
        return self.view.worth(instance, self.view.state.used_ms.get(key, instance.since_ms))

    def may_leave(self, node: NodeView, instance: InstanceView) -> bool:
        """Whether pins, minimum replicas and what was decided before let an instance go."""
        key = instance_key(node.node_id, instance.version)
        if instance.residence is not Residence.READY or key in self.closed or key in self.promised:
            return False
        spec = self.view.specs.get(instance.version)
        if spec is None:
            return True  # an old version
        return spec.replicas_wanted == 0 or self.replicas(instance.version) > spec.replicas_wanted

    def leavers(self, node: NodeView) -> list[InstanceView]:
        """Instances of a node that may leave, busy or not."""
        return [each for each in node.instances if self.may_leave(node, each)]

    def is_idle(self, node: NodeView, instance: InstanceView) -> bool:
        """Whether nobody uses an instance or waits for it, and it may leave (invariant 8)."""
        used = self.in_use(node, instance) or instance.version in self.oldest
        return not used and self.may_leave(node, instance)

    def replicas(self, version: VersionKey) -> int:
        """Instances of a version that stand or come, for its owner."""
        holders = {
            node.node_id
            for node in self.view.holders(version)
            if node.healthy
            and is_held(node, version)
            and node.find(version) is not None
            and self.closed.get(instance_key(node.node_id, version)) != BROKEN
        }
        claim = self.view.state.loads.get(version)
        if claim is not None and claim.until_ms > self.now_ms:
            holders.add(claim.node_id)
        return len(holders)

    def over_ms(self, instance: InstanceView) -> int:
        """When an instance has had its quantum."""
        took_ms = instance.stage_ms + instance.load_ms
        return instance.since_ms + max(self.policy.quantum_ms, self.policy.quantum_loads * took_ms)

    def in_use(self, node: NodeView, instance: InstanceView) -> int:
        """Requests that run on an instance."""
        return self.view.state.in_use.get(instance_key(node.node_id, instance.version), 0)

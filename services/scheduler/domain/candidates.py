"""Nodes that may load a version, by their claims on it. Mutable only to remember: one a plan."""

from dataclasses import dataclass, field

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.nodes import InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.plans import PoolView
from services.scheduler.domain.records import PREFILL_STAGE, VersionKey, owner_of
from services.scheduler.domain.sites import claimed_nodes, could_ever_hold, is_held, leaves, retry_at_ms, serves

Shape = tuple[int, int, bool, bool]
Held = tuple[NodeView, InstanceView]


@dataclass(slots=True)
class Candidates:
    """Of one view at one time."""

    view: PoolView
    now_ms: int
    shapes: dict[Shape, dict[NodeId, NodeView]] = field(default_factory=dict)

    def able(self, spec: VersionSpec) -> list[NodeView]:
        """Nodes that could ever hold a version; which they are is the same for all of its shape. O(nodes)."""
        shape = (spec.share, spec.devices, spec.alone, owner_of(spec.version) == PREFILL_STAGE)
        if shape not in self.shapes:
            self.shapes[shape] = {
                node.node_id: node
                for node in self.view.nodes
                if serves(node, spec.version) and could_ever_hold(node, spec)
            }
        able = self.shapes[shape]
        return [able[node_id] for node_id in self.view.order(spec.version) if node_id in able]

    def of(self, spec: VersionSpec) -> list[NodeView]:
        """Nodes that may load a version now: healthy, without it, and not in a pause after a failure."""
        out = {node.node_id for node in self.view.holders(spec.version) if not self._may_take(node, spec.version)}
        out |= {
            node_id
            for (version, node_id), failure in self.view.state.failures.items()
            if version == spec.version and failure.retry_at_ms > self.now_ms
        }
        out |= claimed_nodes(self.view, spec.version, self.now_ms)
        return [node for node in self.able(spec) if node.healthy and node.node_id not in out]

    def held_by_others(self, spec: VersionSpec) -> list[Held]:
        """Ready instances of the version that stand for another owner; a node holds a version once, so it is these or
        other nodes. None on MIG slices that somebody has alone."""
        found = []
        for node in self.view.holders(spec.version) if not spec.alone else ():
            each = node.find_any(spec.version)
            if each is None or each.version == spec.version or each.residence is not Residence.READY:
                continue
            other = self.view.specs.get(each.version)
            if node.healthy and serves(node, spec.version) and other is not None and not other.alone:
                found.append((node, each))
        return found

    def apart(self, spec: VersionSpec) -> list[Held]:
        """Ready instances of the version that stand for another owner and cannot change hands: one of the two is to be
        alone on its devices."""
        able = {node.node_id for node in self.able(spec)}
        found = []
        for node in self.view.holders(spec.version):
            each = node.find_any(spec.version)
            if each is None or each.version == spec.version or each.residence is not Residence.READY:
                continue
            other = self.view.specs.get(each.version)
            if node.healthy and node.node_id in able and (spec.alone or (other is not None and other.alone)):
                found.append((node, each))
        return found

    def _may_take(self, node: NodeView, version: VersionKey) -> bool:
        later = retry_at_ms(self.view.state, node, version) > self.now_ms
        return not (leaves(node, version) or is_held(node, version) or later)

"""Where on a node a model can stand: sets of devices, and what must leave them. Gangs are placed here, all or none.

A model with tensor parallelism k takes k devices of one link group, each with its even share of the bytes; with k = 1
a site is one device. A site fits as a whole or not at all, so no model ever holds a part of its devices. Inside a node
the tightest devices that fit are taken: whole link groups stay free for those who need them.

Pure; `placement.py` decides between sites.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.nodes import (
    ARRIVING,
    LEAVING,
    DeviceView,
    InstanceView,
    NodeView,
    Residence,
    Role,
    VersionSpec,
)
from services.scheduler.domain.plans import Load, PoolView
from services.scheduler.domain.records import PREFILL_STAGE, LoadClaim, PoolState, VersionKey, base_of, owner_of

ON_DEVICE = frozenset({Residence.READY, *ARRIVING, *LEAVING})
COMBINATIONS_MOST = 70  # 4 of 8: beyond it only neighbours in order of free memory are looked at

Order = Callable[[InstanceView], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Site:
    """Devices of one node."""

    node: NodeView
    devices: tuple[int, ...]


@dataclass(slots=True)
class Rooms:
    """Free bytes of every device of a pool, as one plan spends them. Mutable."""

    free: dict[tuple[NodeId, int], int] = field(default_factory=dict)
    most: dict[NodeId, int] = field(default_factory=dict)  # of the roomiest device of a node, where looked at

    @classmethod
    def of(cls, view: PoolView, now_ms: int) -> "Rooms":
        """What is free, less what claimed loads will take that their loaders do not show yet."""
        rooms = cls(dict(view.index.free))
        nodes = {node.node_id: node for node in view.nodes} if view.state.loads else {}
        for version, claim in view.state.loads.items():
            node = nodes.get(claim.node_id)
            if node is not None and claim.until_ms > now_ms and not is_held(node, version):
                for index in claim.devices or (rooms._roomiest(node),):
                    if (node.node_id, index) in rooms.free:  # else its loader came back with other devices
                        rooms.free[(node.node_id, index)] -= _claimed_share(claim)
        return rooms

    def has_room(self, node: NodeView, share: int) -> bool:
        """Whether some device of a node has this much free: a quick look before its sites. O(1) but for the first."""
        most = self.most.get(node.node_id)
        if most is None:
            most = self.most[node.node_id] = max(self.free[(node.node_id, each.index)] for each in node.places)
        return most >= share

    def fits(self, site: Site, share: int) -> bool:
        """Whether every device of a site has this much free."""
        return all(self.free[(site.node.node_id, index)] >= share for index in site.devices)

    def slack(self, site: Site) -> int:
        """What is free on a site in all; less = tighter."""
        return sum(self.free[(site.node.node_id, index)] for index in site.devices)

    def spend(self, site: Site, share: int, leaving: Sequence[InstanceView] = ()) -> None:
        """Take a site, on which `leaving` give their memory up."""
        self.most.pop(site.node.node_id, None)
        for index in site.devices:
            self.free[(site.node.node_id, index)] -= share
        for each in leaving:
            for index in stands_on(site.node, each):
                self.free[(site.node.node_id, index)] += _share_of(site.node, each)

    def reserve(self, site: Site, share: int, leaving: Sequence[InstanceView] = (), *, alone: bool = False) -> None:
        """Keep what is free of a site for one who waits for the rest of it: `leaving` bring what is missing.

        For one who is to be alone there all of it is kept."""
        self.most.pop(site.node.node_id, None)
        for index in site.devices:
            freed = sum(_share_of(site.node, each) for each in leaving if index in stands_on(site.node, each))
            key = (site.node.node_id, index)
            free = max(0, self.free[key])
            self.free[key] -= free if alone else min(free, max(0, share - freed))

    def just_enough(
        self,
        site: Site,
        share: int,
        leaving: Sequence[InstanceView],
        order: Order,
        strangers: Sequence[InstanceView] = (),
    ) -> list[InstanceView] | None:
        """The first of `leaving` by `order` that make room on every device of a site, none that is not needed (B22).

        `strangers` leave in any case. None if they may not, or all of `leaving` together do not make enough room."""
        if not all(each in leaving for each in strangers):
            return None
        missing = {index: share - self.free[(site.node.node_id, index)] for index in site.devices}
        chosen: list[InstanceView] = []
        for each in sorted(leaving, key=order):
            if each in strangers or any(missing.get(index, 0) > 0 for index in stands_on(site.node, each)):
                chosen.append(each)
                _add(missing, site.node, each, -1)
        if any(each > 0 for each in missing.values()):
            return None
        for each in [each for each in chosen if each not in strangers]:
            _add(missing, site.node, each, 1)
            if any(left > 0 for left in missing.values()):
                _add(missing, site.node, each, -1)
            else:
                chosen.remove(each)
        return chosen

    def _roomiest(self, node: NodeView) -> int:
        return max(node.places, key=lambda each: (self.free[(node.node_id, each.index)], -each.index)).index


def sites(node: NodeView, spec: VersionSpec, view: PoolView | None = None) -> Iterator[Site]:
    """Every set of devices of a node that could hold a version if it were empty, and whose neighbours allow it.

    Without a view the neighbours are not looked at."""
    groups: dict[int, list[DeviceView]] = {}
    for each in node.places:
        if each.capacity >= spec.share and _is_allowed(node, each, spec, view):
            groups.setdefault(each.link_group, []).append(each)
    for _, devices in sorted(groups.items()):
        for chosen in _choices(devices, spec.devices):
            yield Site(node, tuple(sorted(each.index for each in chosen)))


def strangers(site: Site, spec: VersionSpec) -> list[InstanceView]:
    """Who must leave the devices of a site before a version may be alone there; nobody for one that need not be."""
    if not spec.alone:
        return []
    return [
        each
        for each in site.node.instances
        if each.residence in ON_DEVICE
        and owner_of(each.version) != owner_of(spec.version)
        and set(site.devices) & set(stands_on(site.node, each))
    ]


def sited(view: PoolView, load: Load, now_ms: int) -> Load | None:
    """A load that names no devices, with the tightest site that it fits on after its victims; None if there is none.

    For loads that were planned by a node's bytes in all. Nodes that tell no devices take it as it is."""
    node = next((each for each in view.nodes if each.node_id == load.node_id), None)
    spec = view.specs.get(load.version)
    if node is not None and (is_held(node, load.version) or load.node_id in claimed_nodes(view, load.version, now_ms)):
        return None  # for whomever: a node holds a version once
    if node is None or spec is None or not node.devices:
        return load
    if not serves(node, load.version):
        return None  # a prefill node, for what is to run whole
    rooms, gone = Rooms.of(view, now_ms), {victim.version for victim in load.victims}
    leaving = [each for each in node.instances if each.version in gone]
    found = []
    for site in sites(node, spec, view):
        chosen = rooms.just_enough(site, spec.share, leaving, lambda each: (each.version,), strangers(site, spec))
        if chosen is not None:
            found.append((rooms.slack(site), site.devices))
    return replace(load, devices=min(found)[1], alone_for=spec.alone_for) if found else None


def serves(node: NodeView, version: VersionKey) -> bool:
    """Whether a node is for what this version is to do: prompts only, or all else."""
    return (node.role is Role.PREFILL) == (owner_of(version) == PREFILL_STAGE)


def could_ever_hold(node: NodeView, spec: VersionSpec) -> bool:
    """Whether a node has the devices that a version needs, whatever stands on them now."""
    if spec.devices == 1 and not spec.alone:
        return any(each.capacity >= spec.share for each in node.places)
    return any(True for _ in sites(node, spec))


def is_held(node: NodeView, version: VersionKey) -> bool:
    """Whether a version is on a node's devices, or on its way there, for whomever."""
    found = node.find_any(version)
    return found is not None and (found.residence is Residence.READY or found.residence in ARRIVING)


def claimed_nodes(view: PoolView, version: VersionKey, now_ms: int) -> set[NodeId]:
    """Where a load of a version has begun, for whomever. O(loads)."""
    base = base_of(version)
    return {
        claim.node_id for other, claim in view.state.loads.items() if claim.until_ms > now_ms and base_of(other) == base
    }


def leaves(node: NodeView, version: VersionKey) -> bool:
    """Whether a version is on its way off a node, for whomever it was there."""
    found = node.find_any(version)
    return found is not None and found.residence in LEAVING


def retry_at_ms(state: PoolState, node: NodeView, version: VersionKey) -> int:
    """When a version may be tried on a node again: what replicas noted, or what its loader says; 0 = now."""
    failure = state.failures.get((version, node.node_id))
    found = node.find(version)
    said = found.retry_at_ms if found is not None and found.residence is Residence.FAILED else 0
    return max(failure.retry_at_ms if failure else 0, said)


def stands_on(node: NodeView, instance: InstanceView) -> tuple[int, ...]:
    """The devices that an instance takes memory of."""
    return instance.devices or (node.places[0].index,)


def _share_of(node: NodeView, instance: InstanceView) -> int:
    return -(-instance.device_bytes // len(stands_on(node, instance)))


def _claimed_share(claim: LoadClaim) -> int:
    return -(-claim.bytes // max(1, len(claim.devices)))


def _add(missing: dict[int, int], node: NodeView, instance: InstanceView, sign: int) -> None:
    for index in stands_on(node, instance):
        if index in missing:
            missing[index] += sign * _share_of(node, instance)


def _choices(devices: list[DeviceView], count: int) -> Iterator[Sequence[DeviceView]]:
    if comb(len(devices), count) <= COMBINATIONS_MOST:
        yield from combinations(devices, count)
        return
    by_room = sorted(devices, key=lambda each: (each.free, each.index))
    for first in range(len(by_room) - count + 1):
        yield by_room[first : first + count]


def _is_allowed(node: NodeView, device: DeviceView, spec: VersionSpec, view: PoolView | None) -> bool:
    """Tenants with MIG slices of their own are alone on them; everybody else keeps off those.

    What stands on a slice without being alone has to leave for one who is (`strangers`); what is on its way there has
    come first."""
    if spec.alone and not device.mig:
        return False
    if view is None or not device.mig:
        return True
    standing = [
        each.version for each in node.instances if each.residence in ON_DEVICE and device.index in stands_on(node, each)
    ]
    coming = [
        version
        for version, claim in view.state.loads.items()
        if claim.node_id == node.node_id and device.index in claim.devices
    ]
    others = [each for each in (*standing, *coming) if owner_of(each) != owner_of(spec.version)]
    if any(each in view.specs and view.specs[each].alone for each in others):
        return False
    return not (spec.alone and any(each in coming for each in others))

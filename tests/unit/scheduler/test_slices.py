"""Slices of a tenant's own: what leaves for it, and why it waits."""

from dataclasses import replace

from roundhouse.vocabulary import NodeId, PoolName, PriorityClass
from services.scheduler.domain.nodes import DeviceView, InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.obstacles import HELD_APART, why_nowhere
from services.scheduler.domain.placement import PoolView, ResidencyPolicy, plan
from services.scheduler.domain.plans import Wait
from services.scheduler.domain.records import LaneDepth, LoadClaim, PoolState, VersionKey, version_key
from services.scheduler.domain.viability import TooBig, viability

NOW = 1_000_000
OWN = version_key("own", "sha256:1", "vip")
COMMON = tuple(version_key(f"c{number}", "sha256:1") for number in range(3))
SPECS = {OWN: VersionSpec(OWN, 40, alone=True), **{each: VersionSpec(each, 40) for each in COMMON}}
POLICY = ResidencyPolicy()


def standing(version: VersionKey, *devices: int) -> InstanceView:
    """An instance that has been ready for long."""
    return InstanceView(version, Residence.READY, 40, 2, 0, devices=devices)


def node(*instances: InstanceView, slices: int = 2) -> NodeView:
    """A whole GPU of 40, full, and slices of 100."""
    free = [100 - sum(40 for each in instances if index in each.devices) for index in range(1, slices + 1)]
    devices = (DeviceView(0, 40, 0), *(DeviceView(n, 100, left, n, mig=True) for n, left in enumerate(free, start=1)))
    return NodeView(NodeId("n1"), PoolName("p"), True, 40 + 100 * slices, sum(free), instances, devices=devices)


def waiting(version: VersionKey) -> PoolState:
    """One request has waited for a minute."""
    return PoolState(1, (LaneDepth(version, PriorityClass.STANDARD, 1, NOW - 60_000),), {}, {}, {}, {}, {})


def test_everybody_on_a_slice_leaves_though_there_is_room_beside_them() -> None:
    """Slice 1 has one model on it, slice 2 two; 60 and 20 of 100 are free. The one on slice 1 leaves."""
    crowded = node(standing(COMMON[0], 1), standing(COMMON[1], 2), standing(COMMON[2], 2))
    (load,) = plan(PoolView((crowded,), waiting(OWN), SPECS), POLICY, NOW).loads
    assert (load.devices, [victim.version for victim in load.victims]) == ((1,), [COMMON[0]])
    assert load.alone_for
    assert load.alone_for != "vip", "nodes need not know tenants"


def test_a_free_slice_is_taken_before_anybody_leaves() -> None:
    """Slice 2 is empty."""
    (load,) = plan(PoolView((node(standing(COMMON[0], 1)),), waiting(OWN), SPECS), POLICY, NOW).loads
    assert (load.devices, load.victims) == ((2,), ())


def test_nobody_else_comes_beside_it() -> None:
    """The only slice has 60 free; what the tenant has there is not told to leave for others without their need."""
    view = PoolView((node(standing(OWN, 1), slices=1),), waiting(COMMON[0]), SPECS)
    assert plan(view, POLICY, NOW).loads == ()


def test_what_is_on_its_way_to_a_slice_came_first() -> None:
    """Somebody's load on slice 1 has begun and the node does not show it yet: the tenant's goes to slice 2."""
    claim = LoadClaim(NodeId("n1"), "s2", NOW + 5_000, 40, (1,))
    state = replace(waiting(OWN), loads={COMMON[0]: claim})
    (load,) = plan(PoolView((node(),), state, SPECS), POLICY, NOW).loads
    assert load.devices == (2,)


def test_it_says_what_is_missing() -> None:
    """No slice at all; or the only node has the same version for others."""
    without = PoolView((node(slices=0),), waiting(OWN), SPECS)
    assert viability(without, SPECS[OWN], NOW) == TooBig("no node of its pool has a MIG slice of 40 bytes")
    for_others = PoolView((node(standing(version_key("own", "sha256:1"), 1)),), waiting(OWN), SPECS)
    assert why_nowhere(for_others, SPECS[OWN], NOW) == (Wait.NODE, HELD_APART)

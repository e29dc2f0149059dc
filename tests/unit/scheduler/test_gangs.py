"""Gangs: k devices of one link group on one node, or nothing."""

from dataclasses import replace

from roundhouse.vocabulary import NodeId, PoolName, PriorityClass
from services.scheduler.domain.nodes import DeviceView, NodeView, VersionSpec
from services.scheduler.domain.placement import PoolView, ResidencyPolicy, plan
from services.scheduler.domain.plans import Wait
from services.scheduler.domain.records import LaneDepth, LoadClaim, PoolState, version_key

NOW = 1_000_000
GANG = version_key("gang", "sha256:1")
SPECS = {GANG: VersionSpec(GANG, 200, devices=2)}
WAITING = PoolState(1, (LaneDepth(GANG, PriorityClass.STANDARD, 1, NOW - 60_000),), {}, {}, {}, {}, {})


def node(name: str, *free_by_group: tuple[int, ...]) -> NodeView:
    """Devices of 100 each, in link groups, with what is free on each."""
    free = [(group, each) for group, devices in enumerate(free_by_group) for each in devices]
    devices = tuple(DeviceView(index, 100, each, group) for index, (group, each) in enumerate(free))
    room = sum(each for _, each in free)
    return NodeView(NodeId(name), PoolName("p"), True, 100 * len(devices), room, devices=devices)


def test_a_gang_is_never_spread_over_two_link_groups() -> None:
    """Device 0 is free, 1 is not; 2 and 3 are linked and free: those. 200 bytes are 100 on each."""
    (load,) = plan(PoolView((node("n1", (100, 0), (100, 100)),), WAITING, SPECS), ResidencyPolicy(), NOW).loads
    assert (load.devices, load.victims) == ((2, 3), ())


def test_half_a_gang_on_each_of_two_nodes_is_no_gang() -> None:
    """Two nodes with one free device each, which nobody can make more of: it waits, takes neither, and says why."""
    view = PoolView((node("n1", (100, 0)), node("n2", (0, 100))), WAITING, SPECS)
    made = plan(view, ResidencyPolicy(), NOW)
    assert made.loads == ()
    (deferred,) = made.deferred
    assert deferred.why is not Wait.DEVICES, "the nodes have such devices; they are taken now"
    assert deferred.reason


def test_a_claim_on_devices_that_a_node_has_no_more_is_no_reason_to_stop() -> None:
    """Its loader came back with other devices while a load on the old ones was claimed: the gang goes on two others."""
    claim = LoadClaim(NodeId("n1"), "s1", NOW + 15_000, 200, (1, 7))
    state = replace(WAITING, loads={version_key("old", "sha256:1"): claim})
    (load,) = plan(PoolView((node("n1", (100, 100), (100, 100)),), state, SPECS), ResidencyPolicy(), NOW).loads
    assert load.devices == (2, 3)

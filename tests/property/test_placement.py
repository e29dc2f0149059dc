"""Placement under Hypothesis: what no plan may do, and that whoever waits for the same devices gets them in turn."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.vocabulary import NodeId, PoolName, PriorityClass
from services.scheduler.domain.nodes import DeviceView, InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.placement import Plan, PoolView, ResidencyPolicy, plan
from services.scheduler.domain.records import (
    DrainMark,
    InstanceKey,
    LaneDepth,
    PoolState,
    VersionKey,
    instance_key,
    version_key,
)
from services.scheduler.domain.sites import sites, stands_on

POLICY = ResidencyPolicy(quantum_ms=5_000, quantum_loads=2, patience_ms=1_000)
VERSIONS = [version_key(f"m{number}", "sha256:1") for number in range(6)]
NOW = 1_000_000


@dataclass
class Cluster:
    """Nodes of four devices in two link groups of two, which do at once what a plan says."""

    specs: dict[VersionKey, VersionSpec]
    nodes: int
    capacity: int
    standing: dict[tuple[int, VersionKey], tuple[tuple[int, ...], int]] = field(default_factory=dict)  # devices, since
    in_use: dict[InstanceKey, int] = field(default_factory=dict)
    used_ms: dict[InstanceKey, int] = field(default_factory=dict)
    drains: dict[InstanceKey, DrainMark] = field(default_factory=dict)
    waiting: dict[VersionKey, int] = field(default_factory=dict)  # since
    now_ms: int = NOW

    def free(self, number: int, device: int) -> int:
        """Bytes of one device that nothing takes."""
        taken = sum(
            self.specs[version].share
            for (at, version), (devices, _) in self.standing.items()
            if at == number and device in devices
        )
        return self.capacity - taken

    def view(self) -> PoolView:
        """The snapshot."""
        depths = tuple(LaneDepth(each, PriorityClass.STANDARD, 1, since) for each, since in self.waiting.items())
        state = PoolState(1, depths, self.in_use, self.used_ms, self.drains, {}, {})
        return PoolView(tuple(self.node(number) for number in range(self.nodes)), state, self.specs)

    def node(self, number: int) -> NodeView:
        """One node as its loader says."""
        devices = tuple(DeviceView(each, self.capacity, self.free(number, each), each // 2) for each in range(4))
        instances = tuple(
            InstanceView(version, Residence.READY, self.specs[version].device_bytes, 1, since_ms, 0, 100, devices=on)
            for (at, version), (on, since_ms) in sorted(self.standing.items())
            if at == number
        )
        return NodeView(
            name(number),
            PoolName("p"),
            True,
            4 * self.capacity,
            sum(each.free for each in devices),
            instances,
            devices=devices,
        )

    def step(self, *, ms: int) -> Plan:
        """Plan, do it (one load, as `Residency` does), serve who can be served, let time pass."""
        view = self.view()
        decided = plan(view, POLICY, self.now_ms)
        check(view, decided)
        for reopened in decided.reopen:
            self.drains.pop(reopened.instance, None)
        for rotation in decided.rotations:
            self.drains[rotation.victim.instance] = DrainMark(rotation.purpose, self.now_ms + 15_000)
        for load in () if decided.reopen or decided.rotations else decided.loads[:1]:
            number = int(load.node_id[1:])
            for victim in load.victims:
                self.standing.pop((number, victim.version))
                self.drains.pop(victim.instance, None)
            self.standing[(number, load.version)] = (load.devices, self.now_ms)
            assert all(self.free(number, each) >= 0 for each in range(4)), "invariant 6"
        self.serve()
        self.now_ms += ms
        return decided

    def serve(self) -> None:
        """Whoever waits for an open instance runs there until the next step; what ran has ended."""
        self.in_use = {}
        for number, version in self.standing:
            key = instance_key(name(number), version)
            mark = self.drains.get(key)
            if version in self.waiting and (mark is None or mark.until_ms <= self.now_ms):
                del self.waiting[version]
                self.in_use[key] = 1
                self.used_ms[key] = self.now_ms


def name(number: int) -> NodeId:
    return NodeId(f"n{number}")


def check(view: PoolView, decided: Plan) -> None:
    """What holds for every plan."""
    nodes = {node.node_id: node for node in view.nodes}
    awaited = {depth.version for depth in view.state.depths}
    loaded = {load.version for load in decided.loads}
    reasons = {each.version for each in (*decided.deferred, *decided.busy)}
    assert awaited <= loaded | reasons, "a reason for everything that waits"
    assert len(loaded) == len(decided.loads), "invariant 7"
    free = {(node.node_id, each.index): each.free for node in view.nodes for each in node.places}
    for load in decided.loads:
        node, spec = nodes[load.node_id], view.specs[load.version]
        assert len(load.devices) == spec.devices, "all or none"
        assert len({each.link_group for each in node.places if each.index in load.devices}) == 1
        for victim in load.victims:
            found = node.find(victim.version)
            assert found is not None
            assert not view.state.in_use.get(victim.instance, 0), "invariant 8"
            mark = view.state.drains.get(victim.instance)
            assert victim.version not in awaited or (mark is not None and mark.purpose == load.version), "invariant 8"
            for index in stands_on(node, found):
                free[(node.node_id, index)] += view.specs[victim.version].share
        for index in load.devices:
            free[(node.node_id, index)] -= spec.share
    assert all(each >= 0 for each in free.values()), "invariant 6"
    closed = {key for key, mark in view.state.drains.items()} | {each.victim.instance for each in decided.rotations}
    for version in awaited - loaded:  # work conserving: what fits into free memory is loaded, the oldest first
        if not decided.loads and not closed and not any(node.find(version) for node in view.nodes):
            spec = view.specs[version]
            fits = [
                site
                for node in view.nodes
                for site in sites(node, spec, view)
                if all(free[(node.node_id, index)] >= spec.share for index in site.devices)
            ]
            why = next(each.why.value for each in decided.deferred if each.version == version)
            older = [d.oldest_ms for d in view.state.depths if d.version != version]
            mine = next(d.oldest_ms for d in view.state.depths if d.version == version)
            assert not fits or any(each <= mine for each in older), why


sizes = st.lists(
    st.tuples(st.integers(10, 100), st.sampled_from([1, 1, 1, 2, 2])), min_size=len(VERSIONS), max_size=len(VERSIONS)
)


def cluster(shape: list[tuple[int, int]], nodes: int) -> Cluster:
    specs = {
        version: VersionSpec(version, size * devices, devices=devices)
        for version, (size, devices) in zip(VERSIONS, shape, strict=True)
    }
    return Cluster(specs, nodes, 100)


arrivals = st.lists(st.tuples(st.sampled_from(VERSIONS), st.integers(0, 4_000)), min_size=1, max_size=25)
marks = st.lists(st.tuples(st.sampled_from(VERSIONS), st.sampled_from(VERSIONS)), max_size=6)


@settings(deadline=None)
@given(sizes, st.integers(1, 2), arrivals, marks, st.integers(0, 20))
def test_everybody_is_served_whatever_others_have_closed(
    shape: list[tuple[int, int]],
    nodes: int,
    asked: list[tuple[VersionKey, int]],
    closed: list[tuple[VersionKey, VersionKey]],
    when: int,
) -> None:
    """Models come in any order while some instances are closed for others, as by a replica that raced or died: no plan
    over-commits, touches who is in use, or leaves a wait without a reason, and at the end nobody waits.

    Bound: each of six waiting models waits for at most every other one's quantum (5 s) and for marks of a dead replica
    (15 s): 6 × 5 + 15 = 45 s, here 60 steps of 1 s and as many again for steps in which only marks changed."""
    world = cluster(shape, nodes)
    for number, (version, pause_ms) in enumerate(asked):
        world.waiting.setdefault(version, world.now_ms)
        world.step(ms=pause_ms)
        if number == when % len(asked):
            for instance, purpose in closed:
                for at, found in list(world.standing):
                    if found == instance and purpose != instance:
                        key = instance_key(name(at), found)
                        world.drains[key] = DrainMark(purpose, world.now_ms + 15_000)
    for _ in range(120):
        if not world.waiting:
            return
        world.step(ms=1_000)
    assert not world.waiting


@settings(deadline=None)
@given(st.booleans(), st.integers(0, 500))
def test_two_gangs_that_each_hold_half_do_not_wait_for_each_other(first_older: bool, gap_ms: int) -> None:
    """Two gangs of four devices; each has closed half of what stands there, and what runs there never stops coming.
    The older one gets the other's half at once; both run within two quanta, two drains and two loads."""
    gangs = VERSIONS[:2]
    specs = {each: VersionSpec(each, 400, devices=4) for each in gangs}
    specs |= {each: VersionSpec(each, 100) for each in VERSIONS[2:]}
    world = Cluster(specs, 1, 100)
    for device, version in enumerate(VERSIONS[2:6]):
        world.standing[(0, version)] = ((device,), NOW - 60_000)
        key = instance_key(name(0), version)
        world.drains[key] = DrainMark(gangs[device % 2], NOW + 15_000)
    for gang, older in zip(gangs, (first_older, not first_older), strict=True):
        world.waiting[gang] = NOW - 10_000 - (gap_ms if older else 0)

    def one_group(each: DeviceView) -> DeviceView:
        return replace(each, link_group=0)

    node = world.node
    world.node = lambda number: replace(node(number), devices=tuple(map(one_group, node(number).devices)))  # type: ignore[method-assign]
    served: list[VersionKey] = []
    for _ in range(40):
        before = set(world.waiting)
        world.step(ms=500)
        served += sorted(before - set(world.waiting))
        for version in VERSIONS[2:6]:
            world.waiting.setdefault(version, world.now_ms)
        if set(gangs) <= set(served):
            break
    first = min(gangs, key=lambda each: (NOW - 10_000 - (gap_ms if (each == gangs[0]) == first_older else 0), each))
    assert [each for each in served if each in gangs][:2] == [first, next(each for each in gangs if each != first)]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(300, 700), min_size=70, max_size=70))
def test_a_gang_is_not_starved_by_small_models_that_keep_coming(pauses_ms: list[int]) -> None:
    """Eight small models on four devices, asked for again as soon as served: each load begins a new quantum on its
    device. What the gang waits for is kept free of younger demands, so it waits for the four older ones (a quantum of
    5 s, and a closing and a load of each: 8 steps), for their quantum and its own closing and load, and for steps in
    which something is only opened again: 10 s + 14 × 0.7 s."""
    gang, small = version_key("gang", "sha256:1"), [version_key(f"s{number}", "sha256:1") for number in range(8)]
    specs = {gang: VersionSpec(gang, 200, devices=2)} | {each: VersionSpec(each, 100) for each in small}
    world = Cluster(specs, 1, 100)
    for number, pause_ms in enumerate(pauses_ms):
        if number == 10:
            world.waiting[gang] = world.now_ms
        for each in small:
            world.waiting.setdefault(each, world.now_ms)
        world.step(ms=pause_ms)
        since_ms = world.waiting.get(gang)
        assert since_ms is None or world.now_ms - since_ms <= 10_000 + 14 * 700

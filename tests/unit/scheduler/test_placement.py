"""Placement as tables: who is loaded where, who leaves, and why somebody waits."""

from dataclasses import replace

from roundhouse.vocabulary import NodeId, PoolName, PriorityClass
from services.scheduler.domain import affinity
from services.scheduler.domain.nodes import InstanceView, NodeView, Residence, Tier, VersionSpec
from services.scheduler.domain.placement import (
    Load,
    Plan,
    PoolView,
    Reopen,
    ResidencyPolicy,
    Rotate,
    Victim,
    plan,
)
from services.scheduler.domain.records import (
    BROKEN,
    DrainMark,
    InstanceKey,
    LaneDepth,
    LoadClaim,
    LoadFailure,
    PoolState,
    VersionKey,
    instance_key,
    version_key,
)
from services.scheduler.domain.viability import BackingOff, NoNode, TooBig, Viable, viability

NOW = 1_000_000
POLICY = ResidencyPolicy(quantum_ms=10_000, quantum_loads=2, patience_ms=2_000)
A, B, C = (version_key(name, "sha256:1") for name in "abc")
SPECS = {each: VersionSpec(each, 100) for each in (A, B, C)}


def ready(version: VersionKey, *, since_ms: int = 0, size: int = 100, load_ms: int = 0) -> InstanceView:
    return InstanceView(version, Residence.READY, size, 2, since_ms, 0, load_ms)


def node(name: str, capacity: int, *instances: InstanceView, healthy: bool = True) -> NodeView:
    used = sum(each.device_bytes for each in instances)
    return NodeView(NodeId(name), PoolName("shared"), healthy, capacity, capacity - used, instances)


def on(name: str, version: VersionKey) -> InstanceKey:
    return instance_key(NodeId(name), version)


def waiting(**waits_ms: int) -> PoolState:
    """Queues with one request each, by model letter, and how long it has waited."""
    depths = tuple(
        LaneDepth(version_key(name, "sha256:1"), PriorityClass.STANDARD, 1, NOW - waited)
        for name, waited in waits_ms.items()
    )
    return PoolState(1, depths, {}, {}, {}, {}, {})


def decide(state: PoolState, *nodes: NodeView, specs: dict[VersionKey, VersionSpec] = SPECS) -> Plan:
    return plan(PoolView(nodes, state, specs), POLICY, NOW)


def reasons(decided: Plan) -> list[str]:
    return [each.reason for each in decided.deferred]


def test_a_cold_model_goes_to_one_of_its_own_nodes() -> None:
    """Of six equal nodes it belongs to two (one replica and one to move to): the one with the higher claim, whatever
    is free; if neither has room, elsewhere."""
    names = [f"n{number}" for number in range(6)]
    first, second, *others = sorted(names, key=lambda name: -affinity.weight(A, NodeId(name)))
    for full, expected in (((), {first}), ((first,), {second}), ((first, second), set(others))):
        nodes = [node(name, 100 if name in full else 300, *([ready(B)] if name in full else [])) for name in names]
        busy = {on(name, B): 1 for name in full}
        (load,) = decide(replace(waiting(a=0), in_use=busy), *nodes).loads
        assert load.node_id in expected


def test_a_cold_model_goes_where_it_starts_first() -> None:
    """4 GB: 8 s from the source at 0.5 GB/s on its own node; from disk at 2 GB/s elsewhere 2 s; with three loads of 4 s
    going on there it is the source again. Measured speeds replace the priors."""
    specs = {A: VersionSpec(A, 4_000_000_000)}
    home, away = sorted(("n1", "n2", "n3"), key=lambda name: -affinity.weight(A, NodeId(name)))[::2]
    staged = InstanceView(A, Residence.STAGED, 4_000_000_000, 2, 0, tier=Tier.DISK)
    others = [
        InstanceView(each, Residence.LOADING, 1, 2, NOW, remaining_ms=4_000)
        for each in (B, C, version_key("d", "sha256:1"))
    ]

    def where(*instances: InstanceView, source: int = 0) -> str:
        nodes = [
            NodeView(
                NodeId(name),
                PoolName("shared"),
                True,
                5_000_000_000,
                5_000_000_000,
                instances if name == away else (),
                speeds=((Tier.SOURCE, source),) if name == home else (),
            )
            for name in (home, away)
        ]
        return decide(waiting(a=0), *nodes, specs=specs).loads[0].node_id

    assert where(staged) == away
    assert where(staged, *others) == home
    assert where(staged, source=4_000_000) == home


def test_the_oldest_demand_is_placed_first_and_memory_is_spent_once() -> None:
    """Room for one: b has waited longer; a waits for room."""
    decided = decide(waiting(a=10, b=20), node("n1", 100))
    assert [load.version for load in decided.loads] == [B]
    assert reasons(decided) == ["no memory is free and no instance is idle"]


def test_the_least_recently_used_idle_model_leaves() -> None:
    """a was used at 5, b at 9: a leaves for c."""
    state = replace(waiting(c=0), used_ms={on("n1", A): 5, on("n1", B): 9})
    decided = decide(state, node("n1", 200, ready(A), ready(B)))
    assert decided.loads == (Load(C, NodeId("n1"), 100, (Victim(on("n1", A), A),), "demand"),)


def test_no_more_leave_than_needed() -> None:
    """B22: 150 needed, 0 free; a (50) is oldest, then b (200): b alone is enough, so a stays."""
    specs = {A: VersionSpec(A, 50), B: VersionSpec(B, 200), C: VersionSpec(C, 150)}
    state = replace(waiting(c=0), used_ms={on("n1", A): 1, on("n1", B): 2})
    decided = decide(state, node("n1", 250, ready(A, size=50), ready(B, size=200)), specs=specs)
    assert [victim.version for victim in decided.loads[0].victims] == [B]


def test_who_is_in_use_waited_for_or_pinned_stays() -> None:
    """Invariant 8: a runs a request, b is waited for, c is pinned: none is idle for d."""
    d = version_key("d", "sha256:1")
    specs = SPECS | {C: VersionSpec(C, 100, pinned=True), d: VersionSpec(d, 100)}
    state = replace(waiting(b=5, d=0), in_use={on("n1", A): 1})
    decided = decide(state, node("n1", 300, ready(A), ready(B), ready(C)), specs=specs)
    assert (decided.loads, decided.rotations) == ((), ())
    assert reasons(decided) == ["no memory is free and no instance is idle"]


def test_a_load_that_has_begun_is_not_begun_again() -> None:
    """Invariant 7: claimed, or seen loading on a node."""
    claim = LoadClaim(NodeId("n1"), "s1", NOW + 1, 100)
    assert decide(replace(waiting(a=0), loads={A: claim}), node("n1", 100)).loads == ()
    loading = InstanceView(A, Residence.LOADING, 100, 2, NOW)
    assert decide(waiting(a=0), node("n1", 100, loading)).loads == ()


def test_memory_of_a_claim_counts_before_the_loader_says_so() -> None:
    """Free 100, but another replica has claimed it for b: a waits."""
    state = replace(waiting(a=0), loads={B: LoadClaim(NodeId("n1"), "s1", NOW + 1, 100)})
    assert decide(state, node("n1", 100)).loads == ()


def test_unhealthy_and_backing_off_nodes_are_left_out() -> None:
    """n1 is silent; on n2 the load of a failed and the pause has not ended; n3 takes it."""
    state = replace(waiting(a=0), failures={(A, NodeId("n2")): LoadFailure(NOW + 1, 1, "broke")})
    decided = decide(state, node("n1", 300, healthy=False), node("n2", 200), node("n3", 100))
    assert [load.node_id for load in decided.loads] == ["n3"]


def test_a_busy_model_is_closed_after_its_quantum() -> None:
    """B24: a has been ready for 10 s and is busy; c has waited 2 s: a is closed. At 9.999 s it is not."""
    for since_ms, expected in ((NOW - 10_000, (Rotate(Victim(on("n1", A), A), C),)), (NOW - 9_999, ())):
        state = replace(waiting(a=0, c=2_000), in_use={on("n1", A): 2})
        assert decide(state, node("n1", 100, ready(A, since_ms=since_ms))).rotations == expected


def test_a_slow_load_earns_a_longer_stay() -> None:
    """A load of 7 s earns 14 s: at 13.999 s the model may not be closed yet."""
    for age_ms, closed in ((13_999, 0), (14_000, 1)):
        state = replace(waiting(a=0, c=9_000), in_use={on("n1", A): 2})
        busy = ready(A, since_ms=NOW - age_ms, load_ms=7_000)
        assert len(decide(state, node("n1", 100, busy)).rotations) == closed


def test_a_closed_model_is_replaced_once_it_runs_nothing() -> None:
    """B24 and invariant 8: closed for c; with one running it waits, with none c is loaded, though a is waited for."""
    mark = {on("n1", A): DrainMark(C, NOW + 1)}
    busy = replace(waiting(a=50_000, c=9_000), drains=mark, in_use={on("n1", A): 1})
    assert decide(busy, node("n1", 100, ready(A))).loads == ()
    idle = replace(busy, in_use={})
    assert decide(idle, node("n1", 100, ready(A))).loads == (
        Load(C, NodeId("n1"), 100, (Victim(on("n1", A), A),), "demand"),
    )


def test_a_closed_model_is_opened_again_when_nobody_wants_its_memory() -> None:
    """c's clients have left."""
    state = replace(waiting(a=5), drains={on("n1", A): DrainMark(C, NOW + 1)})
    assert decide(state, node("n1", 100, ready(A))).reopen == (Reopen(on("n1", A)),)


def test_pinned_and_wanted_replicas_are_loaded_without_demand() -> None:
    """a is pinned, b wants two replicas of which it has one."""
    specs = {A: VersionSpec(A, 100, pinned=True), B: VersionSpec(B, 100, min_replicas=2)}
    decided = decide(waiting(), node("n1", 200, ready(B)), node("n2", 100), specs=specs)
    assert [(load.version, load.node_id, load.reason) for load in decided.loads] == [
        (A, "n1", "prewarm"),
        (B, "n2", "prewarm"),
    ]


def test_viability_tells_what_can_run() -> None:
    """B13 and B22: too big for every node; no node; ready; cold; backing off with its cause."""
    spec = SPECS[A]

    def ask(state: PoolState, *nodes: NodeView, spec: VersionSpec = spec) -> object:
        return viability(PoolView(nodes, state, SPECS), spec, NOW)

    failed = replace(waiting(), failures={(A, NodeId("n1")): LoadFailure(NOW + 5, 2, "broke")})
    assert ask(waiting(), node("n1", 99)) == TooBig("no node of its pool has a device of 100 bytes")
    assert ask(waiting()) == NoNode()
    assert ask(waiting(), node("n1", 100, healthy=False)) == NoNode()
    assert ask(waiting(), node("n1", 100, ready(A))) == Viable(2)
    assert ask(waiting(), node("n1", 100)) == Viable(0)
    assert ask(failed, node("n1", 100)) == BackingOff(NOW + 5, 2, "broke")
    assert ask(failed, node("n1", 100), node("n2", 100)) == Viable(0)


def test_a_dead_instance_is_neither_served_nor_evicted_nor_reopened() -> None:
    """`a` is closed as broken on n1: it loads on n2; nothing is taken from n1 although it looks ready and idle."""
    mark = {on("n1", A): DrainMark(BROKEN, NOW + 1)}
    state = replace(waiting(a=10_000), drains=mark)
    decided = decide(state, node("n1", 100, ready(A)), node("n2", 100))
    assert decided.loads == (Load(A, NodeId("n2"), 100, (), "demand"),)
    assert decided.reopen == ()
    alone = decide(replace(waiting(b=10_000), drains=mark), node("n1", 100, ready(A)))
    assert (alone.loads, alone.rotations) == ((), ())


def test_a_load_that_was_given_up_does_not_count_as_on_its_way() -> None:
    """`a` is still "loading" on n1, where its victims do not leave: until the pause ends, n2 may load it."""
    stuck = replace(ready(A), residence=Residence.LOADING)
    failures = {(A, NodeId("n1")): LoadFailure(NOW + 1, 0, "what had to leave first does not leave")}
    decided = decide(replace(waiting(a=10), failures=failures), node("n1", 100, stuck), node("n2", 100))
    assert [load.node_id for load in decided.loads] == [NodeId("n2")]
    assert decide(waiting(a=10), node("n1", 100, stuck), node("n2", 100)).loads == ()

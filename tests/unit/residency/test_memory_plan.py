"""Which models get the memory, and the moves that lead there."""

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.memory_plan import Move, NodeMemory, Resident, Want, planned

A, B, C, D = (VersionKey(name) for name in "abcd")
N1, N2 = NodeId("n1"), NodeId("n2")


def want(version: VersionKey, *values: float, size: int = 10, floor: int = 0) -> Want:
    """A model of 10 bytes."""
    return Want(version, size, values, floor)


def node(node_id: NodeId, *residents: Resident, capacity: int = 20) -> NodeMemory:
    """Room for two."""
    return NodeMemory(node_id, capacity, residents)


def test_the_most_valuable_come_first_and_the_rest_is_told_why() -> None:
    """Room for two of three."""
    plan = planned([node(N1)], [want(A, 1.0), want(B, 3.0), want(C, 2.0)])
    assert [move.version for move in plan.moves] == [B, C]
    assert [(each.version, each.replica) for each in plan.not_placed] == [(A, 1)]
    assert plan.price == 2.0


def test_a_swap_must_gain_more_than_a_quarter() -> None:
    """A is worth 1.0 and there: 1.2 does not push it out, 1.3 does."""
    full = node(N1, Resident(A, 10), capacity=10)
    assert planned([full], [want(A, 1.0), want(B, 1.2)]).moves == ()
    (move,) = planned([full], [want(A, 1.0), want(B, 1.3)]).moves
    assert move == Move(N1, B, 1, 10, (A,), "replica 1: saves 1.3 ms of waiting per MiB and ms")


def test_what_must_be_there_goes_before_what_is_worth_more() -> None:
    """A minimum of one replica, worth nothing now."""
    plan = planned([node(N1, capacity=10)], [want(A, floor=1), want(B, 100.0)])
    assert [(move.version, move.reason) for move in plan.moves] == [(A, "replica 1: must be there")]


def test_what_is_in_use_stays_whatever_it_is_worth() -> None:
    """Invariant 8: the plan goes elsewhere or not at all."""
    busy = node(N1, Resident(A, 10, held=True), capacity=10)
    plan = planned([busy], [want(B, 100.0)])
    assert plan.moves == ()
    assert plan.not_placed[0].version == B


def test_replicas_of_one_model_are_on_different_nodes() -> None:
    """Three wanted, two nodes: the third has no place."""
    plan = planned([node(N1), node(N2)], [want(A, 3.0, 2.0, 1.0)])
    assert sorted(move.node_id for move in plan.moves) == [N1, N2]
    assert [(each.version, each.replica) for each in plan.not_placed] == [(A, 3)]


def test_nothing_is_unloaded_while_there_is_room() -> None:
    """A is wanted no more; its memory is not needed either."""
    assert planned([node(N1, Resident(A, 10))], [want(B, 1.0)]).moves == (
        Move(N1, B, 1, 10, (), "replica 1: saves 1 ms of waiting per MiB and ms"),
    )


def test_the_least_valuable_leaves() -> None:
    """C and D are there, worth 1 and 2; B is worth 5."""
    plan = planned([node(N1, Resident(C, 10), Resident(D, 10))], [want(B, 5.0), want(C, 1.0), want(D, 2.0)])
    assert [(move.version, move.unload) for move in plan.moves] == [(B, (C,))]


def test_nothing_leaves_that_the_next_plan_would_bring_back() -> None:
    """24 bytes are free on n1; A rests on n2. By value B goes to n2 first (2.0 against 1.25), in A's place, and its
    second replica to n1. But then one of them is worth 0.6, and A, 1.0, would come back. So B goes to n1; A stays."""
    nodes = [
        node(N1, Resident(C, 76, held=True), capacity=100),
        node(N2, Resident(D, 45, held=True), Resident(A, 38), capacity=100),
    ]
    plan = planned(nodes, [want(A, 1.0, size=38), want(B, 2.0, 0.5, size=24)])
    assert [(move.node_id, move.version, move.unload) for move in plan.moves] == [(N1, B, ())]
    assert plan.not_placed[-1].reason == "what it would replace would come back for it"


def test_a_plan_that_was_carried_out_is_not_planned_again() -> None:
    """The second look moves nothing."""
    wants = [want(A, 1.0), want(B, 3.0, 2.5), want(C, 2.0)]
    first = planned([node(N1), node(N2)], wants)
    after = [
        node(each, *(Resident(move.version, move.bytes) for move in first.moves if move.node_id == each))
        for each in (N1, N2)
    ]
    assert planned(after, wants).moves == ()

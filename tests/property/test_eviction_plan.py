"""Plans of any pool: no node over-committed at any step, nothing in use leaves, no flapping."""

from hypothesis import given
from hypothesis import strategies as st

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.memory_plan import NodeMemory, Resident, Want, planned
from services.scheduler.domain.warmth.queueing import Traffic
from services.scheduler.domain.warmth.replicas import HEADROOM, HOLD_MS, Promise, Wanted, adjusted

CAPACITY = 100
NAMES = [VersionKey(f"m{number}") for number in range(8)]
SIZES = {name: 10 + 7 * place for place, name in enumerate(NAMES)}


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[NodeMemory], list[Want]]:
    """Nodes with residents that fit, and wants for some of the models."""
    nodes = []
    for number in range(draw(st.integers(1, 3))):
        residents, used = list[Resident](), 0
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5)):
            if used + SIZES[name] <= CAPACITY:
                residents.append(Resident(name, SIZES[name], draw(st.booleans())))
                used += SIZES[name]
        nodes.append(NodeMemory(NodeId(f"n{number}"), CAPACITY, tuple(residents)))
    values = st.lists(st.floats(0.01, 100), max_size=3).map(lambda found: tuple(sorted(found, reverse=True)))
    wants = [
        Want(name, SIZES[name], draw(values), draw(st.integers(0, 2)))
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    return nodes, wants


@given(pools())
def test_every_prefix_of_a_plan_fits_and_spares_what_is_in_use(pool: tuple[list[NodeMemory], list[Want]]) -> None:
    """Whoever stops half-way leaves no node over-committed (invariants 6 and 8)."""
    nodes, wants = pool
    here = {node.node_id: {each.version: each.bytes for each in node.residents} for node in nodes}
    held = {(node.node_id, each.version) for node in nodes for each in node.residents if each.held}
    for move in planned(nodes, wants).moves:
        for version in move.unload:
            assert (move.node_id, version) not in held
            del here[move.node_id][version]
        assert move.version not in here[move.node_id]
        here[move.node_id][move.version] = move.bytes
        assert sum(here[move.node_id].values()) <= CAPACITY


@given(pools())
def test_a_plan_does_not_depend_on_the_order_it_is_asked_in(pool: tuple[list[NodeMemory], list[Want]]) -> None:
    """Two replicas with the same view plan the same."""
    nodes, wants = pool
    assert planned(nodes, wants) == planned(nodes[::-1], wants[::-1])


@given(pools())
def test_a_plan_carried_out_is_followed_by_no_move_of_the_same_model_back(
    pool: tuple[list[NodeMemory], list[Want]],
) -> None:
    """What the first plan evicted from a node, the second does not bring back there."""
    nodes, wants = pool
    first = planned(nodes, wants)
    gone = {(move.node_id, version) for move in first.moves for version in move.unload}
    after = []
    for node in nodes:
        mine = [move for move in first.moves if move.node_id == node.node_id]
        stay = [each for each in node.residents if (node.node_id, each.version) not in gone]
        came = [Resident(move.version, move.bytes) for move in mine]
        after.append(NodeMemory(node.node_id, CAPACITY, (*stay, *came)))
    assert not any((move.node_id, move.version) in gone for move in planned(after, wants).moves)


@given(st.floats(0.01, 20), st.lists(st.floats(1 / HEADROOM + 0.001, 1), min_size=2, max_size=60))
def test_a_rate_that_stays_within_a_quarter_never_moves_the_count_down(peak: float, shares: list[float]) -> None:
    """No 2, 1, 2, 1: at most steps up, however long it goes on."""
    wanted, counts = Wanted(0), []
    for place, share in enumerate(shares):
        traffic = Traffic(peak * share / 1_000, 1_000)
        wanted = adjusted(wanted, traffic, slots=2, promise=Promise(500), now_ms=place * HOLD_MS)
        counts.append(wanted.replicas)
    assert counts == sorted(counts)

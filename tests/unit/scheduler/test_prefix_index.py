"""What a replica knows of the blocks on each node, and that it knows when it does not."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.prefix_index import BlockChanges, Heard, PrefixIndex

N = NodeId("n")
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(20)]


def stored(sequence: int, *numbers: int, incarnation: str = "a", dropped: tuple[int, ...] = ()) -> BlockChanges:
    return BlockChanges(
        N, incarnation, sequence, tuple(KEYS[each] for each in numbers), tuple(KEYS[each] for each in dropped)
    )


def test_the_leading_run_counts() -> None:
    """Blocks 0, 1 and 3 are there: of the prompt 0, 1, 2, 3 two blocks are cached; of another node's none."""
    index = PrefixIndex()
    assert index.observe(stored(1, 0, 1, 3)) is Heard.APPLIED
    assert index.cached_blocks(N, KEYS[:4]) == 2
    assert index.cached_blocks(NodeId("other"), KEYS[:4]) == 0
    index.observe(stored(2, dropped=(1,)))
    assert index.cached_blocks(N, KEYS[:4]) == 1


def test_a_gap_asks_for_a_list_and_what_came_meanwhile_is_not_lost() -> None:
    """2 is lost; the list is as of 2, and 3 and 4 had been kept."""
    index = PrefixIndex()
    index.observe(stored(1, 0))
    assert index.observe(stored(3, 2)) is Heard.GAP
    assert index.observe(stored(4, dropped=(0,))) is Heard.GAP
    assert index.replace(N, "a", 2, [key[:8] for key in KEYS[:2]]) is Heard.APPLIED
    assert index.cached_blocks(N, KEYS[1:4]) == 2
    assert index.cached_blocks(N, KEYS[:1]) == 0
    assert index.observe(stored(5, 5)) is Heard.APPLIED


def test_a_list_that_is_too_old_is_not_enough() -> None:
    """The list is as of 2, but 3 is missing before 4."""
    index = PrefixIndex()
    index.observe(stored(4, 1))
    assert index.replace(N, "a", 2, [KEYS[0]]) is Heard.GAP
    assert index.replace(N, "a", 4, [KEYS[0], KEYS[1]]) is Heard.APPLIED


def test_a_message_without_keys_tells_that_the_last_one_was_lost() -> None:
    """It repeats the number of the last one: known is fine, another one is a gap."""
    index = PrefixIndex()
    index.observe(stored(1, 0))
    assert index.observe(stored(1)) is Heard.OLD
    assert index.observe(stored(2)) is Heard.GAP


def test_a_new_kvstore_process_has_nothing_of_the_old_one() -> None:
    """Its first message counts from one again."""
    index = PrefixIndex()
    index.observe(stored(7, 0))
    index.replace(N, "a", 7, [KEYS[0]])
    assert index.observe(stored(1, 1, incarnation="b")) is Heard.APPLIED
    assert index.cached_blocks(N, KEYS[:1]) == 0
    assert index.cached_blocks(N, KEYS[1:2]) == 1


def test_memory_is_bounded() -> None:
    """A bound of ten: the node that has most forgets its oldest; `held` is the true count."""
    index = PrefixIndex(keys_most=10)
    for number in range(20):
        index.observe(stored(number + 1, number))
    assert index.held == len(index.nodes[N].keys) <= 10
    assert index.cached_blocks(N, KEYS[19:]) == 1
    index.forget(N)
    assert index.held == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3)), max_size=60))
def test_after_any_losses_the_next_list_makes_it_right(events: list[tuple[bool, int, int]]) -> None:
    """A model with a set: lost (3), repeated (2) and normal messages; a list as of the end gives exactly the set."""
    index, truth, sequence = PrefixIndex(), set[int](), 0
    for store, number, fate in events:
        sequence += 1
        (truth.add if store else truth.discard)(number)
        message = stored(sequence, number) if store else stored(sequence, dropped=(number,))
        for _ in range({3: 0, 2: 2}.get(fate, 1)):
            index.observe(message)
    if index.observe(BlockChanges(N, "a", sequence)) is Heard.GAP:
        assert index.replace(N, "a", sequence, [KEYS[each] for each in sorted(truth)]) is Heard.APPLIED
    assert {each for each in range(10) if index.cached_blocks(N, [KEYS[each]])} == truth

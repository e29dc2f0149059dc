"""What is learned from lookups: gaps of blocks that are here and of those that have gone, and how sessions think."""

import pytest

from services.kvstore.domain.records import Block
from services.kvstore.domain.reuse_forecast import bin_of, kind_of, kind_of_new
from services.kvstore.domain.slot_arena import Slot
from services.kvstore.domain.use_history import AWAITED_MAX, GONE_MIN, UseHistory
from tests.builders.kv_blocks import OTHER_SALT, SALT


def stored(history: UseHistory, name: str, now_ms: int, parent: Block | None = None, salt: bytes = SALT) -> Block:
    """A block that becomes visible."""
    made = Block(name.encode(), salt, b"model", b"", Slot(0, 1), 64, 0, stored=True)
    history.stored(made, parent, now_ms)
    return made


def test_a_use_counts_once_and_a_session_thinks_as_it_did() -> None:
    """Stored at 0, found at 60 s and, by the same request, 0.5 s later; then at 90.5 s: 2 uses; it thinks for 60 s,
    then for (60 + 30) / 2 = 45 s, and so do its new blocks."""
    history = UseHistory()
    first = stored(history, "a/0", 0)
    history.looked_up([first], [], 60_000)
    history.looked_up([first], [], 60_500)
    assert (first.uses, first.think_ms, first.used_ms) == (1, 60_000, 60_500)
    history.looked_up([first], [], 90_500)
    assert (first.uses, first.think_ms) == (2, 45_000)
    assert stored(history, "a/1", 90_500, first).think_ms == 45_000
    assert first.kind == kind_of(2, 45_000) == 2 * 6 + 3


def test_what_has_gone_is_learned_from_too_and_remembered_when_it_returns() -> None:
    """Dropped at 10 s, asked for in vain at 60 s, stored again: its gap counts, and it comes back as used once."""
    history = UseHistory()
    first = stored(history, "a/0", 0)
    history.dropped(first, 0)
    history.looked_up([], [b"a/0", b"a/1"], 60_000)
    history.forecast.learn()
    assert history.forecast.density(0, 60_000) > 0
    again = stored(history, "a/0", 60_100)
    assert (again.uses, again.think_ms) == (1, 60_000)
    assert history.forecast._began[again.kind] == 1  # the lookup began it; to be stored is no further use


def test_blocks_that_nobody_has_found_are_of_the_kind_of_how_many_came_at_once() -> None:
    """A lookup finds one block and misses 20: they are of the kind of 20, those of a later chunk too. What was found
    meanwhile hands no kind down, nor does what nobody asked for first."""
    history = UseHistory()
    system = stored(history, "system", 0)
    history.looked_up([system], [f"a/{number}".encode() for number in range(20)], 60_000)
    first = stored(history, "a/0", 60_000, system)
    assert first.kind == stored(history, "a/1", 60_100, first).kind == kind_of_new(20) == 2
    assert system.uses == 1
    assert stored(history, "b/0", 60_200, system).kind == 0
    history.looked_up([system, first], [], 70_000)
    assert stored(history, "c/0", 70_000, first).kind == 0


def test_what_was_dropped_in_between_counts_as_brought_and_keeps_its_own_kind() -> None:
    """2 of 20 blocks were stored and have gone. Who asks again brings 20: the 18 new ones are of that kind."""
    history = UseHistory()
    names = [f"a/{number}".encode() for number in range(20)]
    history.looked_up([], names[:2], 0)
    first = stored(history, "a/0", 0)
    second = stored(history, "a/1", 0, first)
    for block in (second, first):
        history.dropped(block, 0)
    history.looked_up([], names, 60_000)
    first = stored(history, "a/0", 60_100)
    second = stored(history, "a/1", 60_100, first)
    assert second.kind == kind_of(1, 60_000)
    assert stored(history, "a/2", 60_100, second).kind == kind_of_new(20)


def test_what_is_awaited_is_bounded_and_forgotten_with_an_erasure() -> None:
    """One lookup more than the bound: what the first missed is not known when it comes. After an erasure nothing is."""
    history = UseHistory()
    for number in range(AWAITED_MAX + 1):
        history.looked_up([], [str(number).encode()], 0)
    assert [stored(history, name, 0).kind for name in ("0", "1")] == [0, kind_of_new(1)]
    history.forget(OTHER_SALT)
    assert stored(history, "2", 0).kind == 0


def test_of_an_erased_tenant_nothing_is_remembered() -> None:
    """Two tenants' blocks have gone; one is erased, and its key is new when it comes again."""
    history = UseHistory()
    for name, salt in (("one", SALT), ("two", OTHER_SALT)):
        history.dropped(stored(history, name, 0, salt=salt), 0)
    history.forget(SALT)
    history.looked_up([], [b"one"], 60_000)
    history.looked_up([], [b"two"], 60_000)
    assert stored(history, "one", 60_100).uses == 0
    assert stored(history, "two", 60_100, salt=OTHER_SALT).uses == 1


def test_what_is_remembered_is_bounded() -> None:
    """Of 10 more than the bound, the 10 that have been gone for longest are forgotten."""
    history = UseHistory()
    for number in range(GONE_MIN + 10):
        history.dropped(stored(history, str(number), number), 0)
    assert len(history._gone) == GONE_MIN
    assert b"9" not in history._gone
    assert b"10" in history._gone


def test_kinds_and_bins() -> None:
    """Uses by powers of two, think times by powers of four from 4 s, what came at once by them from 16 blocks; ages by
    halves of doublings from 1 s."""
    assert [kind_of(uses, 0) // 6 for uses in (0, 1, 2, 3, 4, 15, 16, 1_000)] == [0, 1, 2, 2, 3, 4, 5, 5]
    assert [kind_of(1, ms) - 6 for ms in (0, 1, 3_999, 4_000, 15_999, 16_000, 10**9)] == [0, 1, 1, 2, 2, 3, 5]
    assert [kind_of_new(blocks) for blocks in (0, 1, 15, 16, 63, 64, 256, 1_024, 10**6)] == [0, 1, 1, 2, 2, 3, 4, 5, 5]
    assert [bin_of(ms) for ms in (0, 999, 1_000, 1_415, 2_000, 10**12)] == [0, 0, 1, 2, 3, 27]


def test_density_is_the_best_ratio_of_uses_to_room() -> None:
    """Half of 10,000 uses came back within the bin of 1,000 to 1,414 ms, the others never. At once: 0.5 uses for
    1,000 ms and 3/4 of 414 ms; at 1,000 ms only the latter is left to wait for; later there is nothing."""
    history = UseHistory()
    for number in range(10_000):
        history.forecast.began(0)
        if number % 2:
            history.forecast.came_back(0, bin_of(1_200))
    history.forecast.learn()
    width = 1_000 * (2**0.5 - 1)
    assert history.forecast.density(0, 0) == pytest.approx(0.5 / (1_000 + 0.75 * width))
    assert history.forecast.density(0, 1_100) == pytest.approx(0.5 / (0.75 * width))
    assert history.forecast.density(0, 5_000) == 0

"""Every eviction policy under random pools: the rules hold, the room is made, nobody leaves for nothing."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.eviction import (
    RESIDENCE_LEAST_MS,
    Candidate,
    Chosen,
    EvictionPolicy,
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NotEnough,
    Use,
    choose,
    protected,
)
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.value import ExpectedValue

NOW_MS = 1_000_000
MAKERS: list[Callable[[], EvictionPolicy]] = [
    LeastRecentlyUsed,
    LeastFrequentlyUsed,
    GreedyDualSizeFrequency,
    lambda: ExpectedValue(Forecaster()),
]
CANDIDATES = st.builds(
    Candidate,
    version=st.integers(0, 9).map(lambda number: VersionKey(f"m{number}")),
    bytes=st.integers(1, 100),
    reload_ms=st.integers(1, 10_000),
    loaded_ms=st.integers(NOW_MS - 2 * RESIDENCE_LEAST_MS, NOW_MS),
    pinned=st.booleans(),
    in_use=st.booleans(),
    awaited=st.booleans(),
)
POOLS = st.lists(CANDIDATES, max_size=8, unique_by=lambda each: each.version)
USES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, NOW_MS)), max_size=30)


def informed(maker: int, uses: list[tuple[int, int]]) -> EvictionPolicy:
    """A policy that has seen these uses, in order of time."""
    policy = MAKERS[maker]()
    for number, at_ms in sorted(uses, key=lambda use: use[1]):
        policy.record(Use(VersionKey(f"m{number}"), at_ms))
    return policy


@given(st.integers(0, 3), POOLS, USES, st.integers(1, 400))
def test_the_room_is_made_by_those_who_may_leave_and_by_no_more_than_needed(
    maker: int, pool: list[Candidate], uses: list[tuple[int, int]], wanted: int
) -> None:
    """Or it says how much is missing even if all leave who may (invariant 8, case B22)."""
    answer = choose(informed(maker, uses), pool, wanted, NOW_MS)
    allowed = [each for each in pool if not protected(each, NOW_MS)]
    room = sum(each.bytes for each in allowed)
    if isinstance(answer, NotEnough):
        assert answer.missing_bytes == wanted - room > 0
        return
    victims = [victim.candidate for victim in answer.victims]
    assert all(each in allowed for each in victims)
    assert len(set(victims)) == len(victims)
    freed = sum(each.bytes for each in victims)
    assert freed >= wanted
    assert all(freed - each.bytes < wanted for each in victims)
    assert all(victim.reason for victim in answer.victims)


@given(st.integers(0, 3), POOLS, USES)
def test_the_choice_does_not_depend_on_the_order_of_the_candidates(
    maker: int, pool: list[Candidate], uses: list[tuple[int, int]]
) -> None:
    """Two replicas with the same view agree."""
    one = choose(informed(maker, uses), pool, 50, NOW_MS)
    two = choose(informed(maker, uses), pool[::-1], 50, NOW_MS)
    if isinstance(one, Chosen):
        assert isinstance(two, Chosen)
        assert one == two

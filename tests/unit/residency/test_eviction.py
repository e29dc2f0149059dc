"""Who leaves, under each policy and under the rules of all."""

from dataclasses import replace

import pytest

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.eviction import (
    MIB,
    Candidate,
    Chosen,
    EvictionPolicy,
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NotEnough,
    Use,
    choose,
)
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.value import ExpectedValue

NOW_MS = 10_000_000


def resident(name: str, mib: int = 100, reload_ms: int = 1_000) -> Candidate:
    """A model that may leave."""
    return Candidate(VersionKey(name), mib * MIB, reload_ms, loaded_ms=0)


def leaving(policy: EvictionPolicy, *candidates: Candidate, mib: int = 100) -> list[str]:
    """The names of those that leave."""
    chosen = choose(policy, candidates, mib * MIB, NOW_MS)
    assert isinstance(chosen, Chosen)
    return [victim.candidate.version for victim in chosen.victims]


def used(policy: EvictionPolicy, name: str, *times_ms: int) -> None:
    """Requests at these times before now."""
    for before_ms in sorted(times_ms, reverse=True):
        policy.record(Use(VersionKey(name), NOW_MS - before_ms))


def policies() -> list[EvictionPolicy]:
    """One of each."""
    return [LeastRecentlyUsed(), LeastFrequentlyUsed(), GreedyDualSizeFrequency(), ExpectedValue(Forecaster())]


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("why", ["pinned", "in_use", "awaited"])
def test_pinned_used_and_awaited_models_never_leave(policy: EvictionPolicy, why: str) -> None:
    """Whatever they are worth; the refusal says so (invariant 8)."""
    kept = replace(resident("a"), pinned=why == "pinned", in_use=why == "in_use", awaited=why == "awaited")
    refused = choose(policy, [kept], MIB, NOW_MS)
    assert isinstance(refused, NotEnough)
    assert refused.missing_bytes == MIB
    assert why.replace("_", " ") in refused.reason
    assert leaving(policy, kept, resident("b")) == ["b"]


def test_a_model_loaded_a_moment_ago_stays() -> None:
    """It has been paid for: 1 s of the 2 s of minimum residency are over."""
    fresh = replace(resident("a"), loaded_ms=NOW_MS - 1_000)
    assert leaving(LeastRecentlyUsed(), fresh, resident("b")) == ["b"]
    assert isinstance(choose(LeastRecentlyUsed(), [fresh], 1, NOW_MS), NotEnough)


def test_nobody_leaves_who_is_not_needed() -> None:
    """100 MiB wanted: the least recent is of 40, the next of 100; the second alone is enough (case B22)."""
    policy = LeastRecentlyUsed()
    used(policy, "small", 9_000)
    used(policy, "large", 5_000)
    assert leaving(policy, resident("small", 40), resident("large", 100)) == ["large"]


def test_lru_evicts_the_one_used_longest_ago() -> None:
    """Times: 9 s, 3 s and 1 s ago."""
    policy = LeastRecentlyUsed()
    used(policy, "a", 3_000)
    used(policy, "b", 9_000)
    used(policy, "c", 1_000)
    assert leaving(policy, *map(resident, "abc"), mib=200) == ["b", "a"]


def test_lfu_forgets_old_uses() -> None:
    """8 uses an hour ago count 8 / 2^6 = 0.125 at a half-life of 10 minutes; 1 use now counts 1."""
    policy = LeastFrequentlyUsed(half_life_ms=600_000)
    used(policy, "old", *[3_600_000] * 8)
    used(policy, "new", 0)
    assert leaving(policy, resident("old"), resident("new")) == ["old"]
    assert policy.explain(resident("old"), NOW_MS).startswith("0.12 uses")


def test_gdsf_weighs_uses_cost_and_size() -> None:
    """a: 2 uses x 1000 ms / 100 MiB = 20; b: 3 x 1000 / 200 = 15; c: 1 x 4000 / 100 = 40. b leaves, the clock is 15.

    d comes in with 15 + 1 x 1000 / 100 = 25 and so outlives a (20), which has not been used since.
    """
    policy = GreedyDualSizeFrequency()
    used(policy, "a", 3, 2)
    used(policy, "b", 3, 2, 1)
    used(policy, "c", 1)
    assert leaving(policy, resident("a"), resident("b", 200), resident("c", reload_ms=4_000)) == ["b"]
    assert policy.clock == 15
    used(policy, "d", 0)
    assert leaving(policy, resident("a"), resident("c", reload_ms=4_000), resident("d")) == ["a"]


def test_ours_keeps_the_timer_that_is_about_to_fire() -> None:
    """a fires every 10 minutes and did so 9 minutes ago; b fires every 10 minutes and did so a minute ago: b leaves."""
    policy = ExpectedValue(Forecaster())
    used(policy, "a", *[540_000 + 600_000 * each for each in range(10)])
    used(policy, "b", *[60_000 + 600_000 * each for each in range(10)])
    assert leaving(policy, resident("a"), resident("b")) == ["b"]
    lru = LeastRecentlyUsed()
    used(lru, "a", 540_000)
    used(lru, "b", 60_000)
    assert leaving(lru, resident("a"), resident("b")) == ["a"]  # the habit errs


def test_ours_weighs_the_load_and_the_bytes() -> None:
    """Used alike; twice as long to load is worth twice as much, twice as large is worth half."""
    policy = ExpectedValue(Forecaster())
    for name in "abc":
        used(policy, name, *[60_000 * each for each in range(1, 10)])
    a, b, c = resident("a"), resident("b", reload_ms=2_000), resident("c", 200)
    assert policy.worth(b, NOW_MS) == pytest.approx(2 * policy.worth(a, NOW_MS))
    assert policy.worth(c, NOW_MS) == pytest.approx(policy.worth(a, NOW_MS) / 2)


def test_every_eviction_says_why() -> None:
    """With the policy's name and its figures."""
    policy = ExpectedValue(Forecaster())
    used(policy, "a", *[600_000 * each for each in range(1, 10)])
    chosen = choose(policy, [resident("a")], 1, NOW_MS)
    assert isinstance(chosen, Chosen)
    assert chosen.victims[0].reason.startswith("value: ")
    assert "foresees the next request in" in chosen.victims[0].reason

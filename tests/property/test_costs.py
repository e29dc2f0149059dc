"""The allocation adds up to the cost exactly, whatever the nodes, the use and the prices."""

from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from services.metering.domain.costs import SLOTS_AN_HOUR, NodeHour, NodeUse, cost_report, shared_out
from services.metering.domain.periods import HOUR_MS
from services.metering.domain.rating import sum_of

bits = st.integers(0, 2**SLOTS_AN_HOUR - 1)
hours = st.builds(
    NodeHour,
    hour_ms=st.sampled_from([0, HOUR_MS]),
    node_id=st.sampled_from(["n1", "n2", "n3"]),
    pool=st.sampled_from(["shared", "gold"]),
    present=bits,
    loading=bits,
    devices=st.integers(1, 8),
)
uses = st.builds(
    NodeUse,
    hour_ms=st.sampled_from([0, HOUR_MS, 2 * HOUR_MS]),
    node_id=st.sampled_from(["n1", "n2", "gone"]),
    model=st.sampled_from(["m1", "m2", "m3"]),
    input_tokens=st.integers(1_000, 10**9),
    cached_tokens=st.integers(0, 1_000),
    output_tokens=st.integers(0, 10**9),
    run_ms=st.integers(0, 10**8),
)
rates = st.dictionaries(st.sampled_from(["shared", "gold", "*"]), st.decimals(0, 10**5, places=4))


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_whole_parts_add_up_and_none_is_off_by_one(total: int, weights: list[int]) -> None:
    """The sum is exact, and each part is its exact share rounded up or down."""
    parts = shared_out(total, weights)
    assert sum(parts) == total
    if sum(weights):
        for part, weight in zip(parts, weights, strict=True):
            assert abs(part - Fraction(total * weight, sum(weights))) < 1


@given(st.lists(hours, max_size=12), st.lists(uses, max_size=12), rates)
def test_every_pools_shares_are_its_cost(seen: list[NodeHour], used: list[NodeUse], prices: dict[str, Decimal]) -> None:
    """To the last millionth; no share is negative; only a model with tokens carries anything."""
    unique = {(hour.hour_ms, hour.node_id): hour for hour in seen}
    report = cost_report(unique.values(), used, prices)
    for pool in report.pools:
        mine = [share for share in report.shares if share.pool == pool.pool]
        assert sum_of(share.allocated for share in mine) == pool.cost
        assert all(share.allocated >= 0 for share in mine)
        assert {share.share_of for share in mine} >= {"load", "idle"}
        exact = Fraction(pool.node_ms) * Fraction(pool.per_node_hour) / HOUR_MS
        assert abs(Fraction(pool.cost) - exact) <= Fraction(1, 2_000_000)
    placed = sum(share.tokens for share in report.shares)
    assert placed + report.unplaced_tokens == sum(use.weight for use in used)


@given(st.lists(hours, min_size=1, max_size=6))
def test_sightings_merge_in_any_order_and_again(seen: list[NodeHour]) -> None:
    """Two processes that saw the same node make it no longer."""
    first = seen[0]
    same = [NodeHour(first.hour_ms, first.node_id, first.pool, s.present, s.loading, s.devices) for s in seen]
    forwards, backwards = same[0], same[-1]
    for hour in same:
        forwards = forwards.merged(hour).merged(hour)
    for hour in reversed(same):
        backwards = backwards.merged(hour)
    assert forwards == backwards
    assert forwards.loading_ms <= forwards.present_ms <= HOUR_MS


def test_an_hour_of_one_node_by_hand() -> None:
    """2 an hour: a tenth loading (0.2), half running (1.0), the rest idle (0.8); m1 has 3 of 4 weighted tokens."""
    present = 2**SLOTS_AN_HOUR - 1
    node = NodeHour(0, "n1", "shared", present, 2**36 - 1, 2)
    used = [
        NodeUse(0, "n1", "m1", 2_000, 1_000, 1_000, HOUR_MS // 4),
        NodeUse(0, "n1", "m2", 1_000, 0, 0, HOUR_MS // 4),
    ]
    report = cost_report([node], used, {"*": Decimal(2)})
    assert [(share.share_of, share.model, share.tokens, share.allocated) for share in report.shares] == [
        ("model", "m1", 3_000, Decimal("0.75")),
        ("model", "m2", 1_000, Decimal("0.25")),
        ("load", "", 0, Decimal("0.2")),
        ("idle", "", 0, Decimal("0.8")),
    ]
    assert (report.pools[0].cost, report.pools[0].device_ms) == (Decimal(2), 2 * HOUR_MS)

"""Forecasts of any history are laws of probability, and cost no more the longer the history."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.gap_bins import CLASSES, GapBins
from services.scheduler.domain.warmth.gap_law import GapLaw, law

A = VersionKey("a@1")
GAPS = st.lists(st.integers(0, 10**9), min_size=1, max_size=60)
PIECES = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0.001, 100)).map(
        lambda piece: (float(piece[0]), float(piece[0] + piece[1]), piece[2])
    ),
    min_size=1,
    max_size=20,
)


def is_law(found: GapLaw) -> None:
    """Chances rise from 0 to 1; the survival falls and its integral rises."""
    assert found.reached[0] == 0
    assert abs(found.reached[-1] - 1) < 1e-9
    assert all(low <= high + 1e-9 for low, high in pairwise(found.reached))
    assert all(low < high for low, high in pairwise(found.edges_ms))
    assert all(low <= high + 1e-6 for low, high in pairwise(found.held))


@given(GAPS, st.integers(0, 10**9))
def test_any_history_gives_a_law_and_a_finite_worth(gaps: list[int], idle_ms: int) -> None:
    """Whatever predictor was chosen."""
    forecaster, at_ms = Forecaster(), 0
    for gap in gaps:
        at_ms += gap
        forecaster.record(A, at_ms)
    found = forecaster.law(A)
    assert found is not None
    is_law(found)
    assert 0 <= forecaster.worth_per_ms(A, at_ms + idle_ms) < 10
    explained = forecaster.explain(A, at_ms + idle_ms)
    assert explained is not None
    assert 0 <= explained.next_ms_p10 <= explained.next_ms_p50 <= explained.next_ms_p90


@given(PIECES, st.floats(0, 2e6))
def test_worth_is_at_least_what_holding_to_the_end_gives(pieces: list[tuple[float, float, float]], age: float) -> None:
    """The index is the best over all times to hold, so no worse than any one of them."""
    found = law(pieces)
    alive = found.survival(age)
    if alive < 1e-6:
        return
    steps = 2_000
    width = (found.edges_ms[-1] - age) / steps
    held = sum(found.survival(age + (step + 0.5) * width) for step in range(steps)) * width
    assert found.worth_per_ms(age) >= alive / held * 0.99


@given(PIECES, st.floats(1e-9, 1e-2), st.floats(1, 10))
def test_a_higher_bar_never_gives_more_warm_time(
    pieces: list[tuple[float, float, float]], bar: float, factor: float
) -> None:
    """And spans are in order and apart."""
    found = law(pieces)
    low, high = found.warm_spans(bar), found.warm_spans(bar * factor)
    assert sum(end - start for start, end in high) <= sum(end - start for start, end in low) + 1e-6
    assert all(one[1] < two[0] for one, two in pairwise(low))


@given(st.integers(1, 10**12), st.integers(1, 100_000))
def test_every_gap_lies_in_its_bin(gap_ms: int, step_ms: int) -> None:
    """Fine and coarse."""
    bins = GapBins(step_ms)
    low, high = bins.span(bins.index(gap_ms))
    assert low <= gap_ms < high
    assert high - low <= max(step_ms, gap_ms / 32 + 1)
    coarse = bins.coarse(gap_ms)
    low, high = bins.coarse_span(coarse)
    assert low * (1 - 1e-9) <= gap_ms
    assert gap_ms < high * (1 + 1e-9) or coarse == CLASSES - 1

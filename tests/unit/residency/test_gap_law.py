"""Bins and laws of the time between arrivals, with the arithmetic written out."""

import pytest

from services.scheduler.domain.warmth.gap_bins import GapBins
from services.scheduler.domain.warmth.gap_law import law


@pytest.mark.parametrize(
    ("gap_ms", "span_ms"),
    [
        (0, (0, 1_000)),
        (63_999, (63_000, 64_000)),
        (64_000, (64_000, 66_000)),  # from 64 steps on a bin is 2 steps wide
        (129_000, (128_000, 132_000)),  # and from 128 on, 4
    ],
)
def test_a_bin_is_a_step_up_to_64_steps_and_a_thirty_second_of_its_octave_beyond(
    gap_ms: int, span_ms: tuple[int, int]
) -> None:
    """Bins are narrow where timers are."""
    bins = GapBins(1_000)
    assert bins.span(bins.index(gap_ms)) == span_ms


def test_a_timer_is_worth_one_over_the_time_that_is_left() -> None:
    """A gap of 60 to 61 s, idle for 20 s: one arrival for at most 41 s held, 40.5 on average."""
    timer = law([(60_000, 61_000, 1.0)])
    assert timer.worth_per_ms(20_000) == pytest.approx(1 / 40_500)
    assert timer.worth_per_ms(60_000) == pytest.approx(1 / 500)


def test_a_place_is_held_only_as_long_as_it_pays() -> None:
    """Half of the gaps end within 10 s, half only after 1000 s: the best is to hold 10 s, at 0.5 arrivals in 7.5 s.

    Held to the end it would be 1 arrival in 7.5 + 990 x 0.5 + 5 = 507.5 s (the mean of 5 s and 1010 s).
    """
    burst = law([(0, 10_000, 0.5), (1_000_000, 1_020_000, 0.5)])
    assert burst.worth_per_ms(0) == pytest.approx(0.5 / 7_500)
    assert burst.worth_per_ms(10_000) == pytest.approx(1 / 1_000_000)  # 990 s to go and 10 s on average


def test_survival_is_linear_inside_a_piece_and_halves_beyond_the_last_edge() -> None:
    """3 of 4 within 10 s, 1 of 4 within the next 30."""
    two = law([(0, 10_000, 3.0), (10_000, 40_000, 1.0)])
    assert two.survival(5_000) == pytest.approx(1 - 3 / 8)
    assert two.survival(25_000) == pytest.approx(1 / 8)
    assert two.survival(80_000) == 0.0


def test_quantiles_are_of_the_time_that_is_left() -> None:
    """Uniform over 100 s, idle for 50: half of what is left has come in 25 s."""
    assert law([(0, 100_000, 1.0)]).quantile_ms(50_000, 0.5) == pytest.approx(25_000)


def test_warm_spans_are_where_the_hazard_is_high_enough() -> None:
    """0 to 10 s: 0.5 arrivals in 7.5 s = 0.067/s; 100 to 110 s: 0.5 in 2.5 s = 0.2/s; nothing between."""
    burst = law([(0, 10_000, 0.5), (100_000, 110_000, 0.5)])
    assert burst.warm_spans(0.06 / 1000) == [(0, 10_000), (100_000, 110_000)]
    assert burst.warm_spans(0.1 / 1000) == [(100_000, 110_000)]
    assert burst.warm_spans(0.3 / 1000) == []

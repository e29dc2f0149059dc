"""Which predictor is chosen for which pattern, and what it says."""

import random

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.gap_counts import BINS_MOST

TIMER, OTHER = VersionKey("timer@1"), VersionKey("other@1")
HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def test_a_timer_is_found_and_its_next_arrival_foreseen() -> None:
    """One arrival every 10 minutes; 4 minutes after the last the next is 6 minutes away, within a bin (20 s)."""
    forecaster = Forecaster()
    for place in range(20):
        forecaster.record(TIMER, place * 600_000)
    found = forecaster.explain(TIMER, 19 * 600_000 + 240_000)
    assert found is not None
    assert found.predictor == "timer"
    assert abs(found.next_ms_p50 - 360_000) <= 20_000
    assert "timer foresees" in found.text


def test_two_periods_are_both_kept_in_mind() -> None:
    """Gaps of 1 and 30 minutes in turn: after 2 idle minutes the short one is out of the question."""
    forecaster, at_ms = Forecaster(), 0
    for place in range(40):
        at_ms += 60_000 if place % 2 else 1_800_000
        forecaster.record(TIMER, at_ms)
    law = forecaster.law(TIMER)
    assert law is not None
    assert law.survival(30_000) > 0.9
    assert 0.3 < law.survival(120_000) < 0.7
    assert law.quantile_ms(120_000, 0.5) > 1_500_000


def test_a_rising_model_is_foreseen_by_its_trend() -> None:
    """Gaps shrink by a tenth each time from an hour to a minute: ln 60 / ln (10/9) = 39 of them.

    The last is of a minute; the mean of the last 50 is above ten. Only the trend expects the next within two minutes.
    """
    forecaster, at_ms, gap_ms = Forecaster(), 0.0, float(HOUR_MS)
    while gap_ms > 60_000:
        at_ms += gap_ms
        gap_ms *= 0.9
        forecaster.record(TIMER, int(at_ms))
    found = forecaster.explain(TIMER, int(at_ms))
    assert found is not None
    assert found.predictor == "trend"
    assert found.next_ms_p50 < 120_000


def test_office_hours_are_found_by_the_day_profile() -> None:
    """Requests at random between 9 and 10 only, 20 a day: at night the next one is hours away."""
    chance, forecaster = random.Random(1), Forecaster()
    for day in range(10):
        for at_ms in sorted(chance.uniform(9 * HOUR_MS, 10 * HOUR_MS) for _ in range(20)):
            forecaster.record(TIMER, day * DAY_MS + int(at_ms))
    night = forecaster.explain(TIMER, 9 * DAY_MS + 22 * HOUR_MS)
    assert night is not None
    assert night.next_ms_p50 > 5 * HOUR_MS
    assert night.worth_per_s < 1 / 3600


def test_a_model_never_wanted_is_worth_nothing_and_has_no_forecast() -> None:
    """Unknown is not an error."""
    forecaster = Forecaster()
    assert forecaster.worth_per_ms(OTHER, 0) == 0.0
    assert forecaster.explain(OTHER, 0) is None


def test_a_new_model_is_judged_by_what_the_others_did() -> None:
    """50 timers of a minute: a model seen once or twice is expected back in about a minute too.

    Two thirds of the weight lie on what the others did, on the gap of a minute that repeats, and on its own one gap.
    """
    forecaster = Forecaster()
    for number in range(50):
        for place in range(10):
            forecaster.record(VersionKey(f"m{number}@1"), place * 60_000)
    forecaster.record(OTHER, 600_000)
    forecaster.record(OTHER, 660_000)
    law = forecaster.law(OTHER)
    assert law is not None
    assert law.survival(50_000) > 0.65
    assert law.survival(65_000) < 0.3


def test_arrivals_of_a_burst_count_once() -> None:
    """Ten requests within the step of a second are one arrival: they wait for one load."""
    forecaster = Forecaster(step_ms=1_000)
    for each in range(10):
        forecaster.record(TIMER, each * 50)
    assert forecaster.models[TIMER].arrivals == 1


def test_memory_of_a_model_is_bounded() -> None:
    """However many different gaps there were."""
    chance, forecaster, at_ms = random.Random(1), Forecaster(), 0
    for _ in range(2_000):
        at_ms += int(chance.lognormvariate(11, 3)) + 1_000
        forecaster.record(TIMER, at_ms)
    for predictor in forecaster.models[TIMER].predictors:
        counts = getattr(predictor, "counts", None)
        assert counts is None or len(counts.bins) <= BINS_MOST


def test_a_forgotten_model_leaves_nothing() -> None:
    """Twice is once."""
    forecaster = Forecaster()
    forecaster.record(TIMER, 0)
    forecaster.forget(TIMER)
    forecaster.forget(TIMER)
    assert not forecaster.models

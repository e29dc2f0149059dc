"""When an idle model is warm."""

import pytest

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.keep_alive import (
    ExpectedValueKeepAlive,
    FixedKeepAlive,
    HybridHistogram,
    Window,
)

A = VersionKey("a@1")
MINUTE_MS = 60_000


def test_fixed_keep_alive_is_one_window() -> None:
    """Ten minutes."""
    assert FixedKeepAlive(600_000).windows(A) == (Window(0, 600_000),)


def test_the_hybrid_histogram_unloads_and_puts_back_before_the_timer() -> None:
    """All gaps are 30 min: head 30 x 0.9 = 27 min; the tail's bin ends at 31 min, x 1.1 = 34.1 min."""
    policy = HybridHistogram()
    for place in range(5):
        policy.record(A, place * 30 * MINUTE_MS)
    (window,) = policy.windows(A)
    assert window.from_ms == 27 * MINUTE_MS
    assert window.to_ms == pytest.approx(34.1 * MINUTE_MS)


def test_the_hybrid_histogram_keeps_a_model_it_knows_nothing_of_for_its_whole_range() -> None:
    """Shahrad: no window to unload in, four hours of keep-alive."""
    assert HybridHistogram().windows(A) == (Window(0, 240 * MINUTE_MS),)


def test_the_hybrid_histogram_does_not_unload_a_busy_model() -> None:
    """Gaps of a minute: the head is below the least window."""
    policy = HybridHistogram()
    for place in range(5):
        policy.record(A, place * MINUTE_MS)
    assert policy.windows(A)[0].from_ms == 0


def test_gaps_beyond_the_histogram_are_foreseen_by_their_mean() -> None:
    """Gaps of 10 hours: from 0.85 to 1.15 of them."""
    policy = HybridHistogram()
    for place in range(4):
        policy.record(A, place * 600 * MINUTE_MS)
    (window,) = policy.windows(A)
    assert window.from_ms == pytest.approx(510 * MINUTE_MS)
    assert window.to_ms == pytest.approx(690 * MINUTE_MS)


def test_ours_holds_a_timer_only_around_its_time() -> None:
    """A timer of 30 minutes, at a price of one arrival in 15 minutes: warm in minute 30, not in minute 10."""
    policy = ExpectedValueKeepAlive(Forecaster(step_ms=MINUTE_MS), price=1 / (15 * MINUTE_MS))
    for place in range(30):
        policy.record(A, place * 30 * MINUTE_MS)
    windows = policy.windows(A)
    assert any(window.from_ms <= 30.5 * MINUTE_MS < window.to_ms for window in windows)
    assert not any(window.from_ms <= 10.5 * MINUTE_MS < window.to_ms for window in windows)


def test_a_dearer_price_holds_less() -> None:
    """The same past at twice the price."""
    held = []
    for price in (1 / (60 * MINUTE_MS), 1 / (30 * MINUTE_MS), 1 / (2 * MINUTE_MS)):
        policy = ExpectedValueKeepAlive(Forecaster(step_ms=MINUTE_MS), price)
        for place in (0, 3, 4, 20, 22, 60, 61, 90):
            policy.record(A, place * MINUTE_MS)
        held.append(sum(window.to_ms - window.from_ms for window in policy.windows(A)))
    assert held[0] >= held[1] >= held[2]
    assert held[0] > held[2]

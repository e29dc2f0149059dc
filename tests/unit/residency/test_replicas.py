"""How many replicas a model wants."""

import pytest

from services.scheduler.domain.warmth.queueing import Traffic
from services.scheduler.domain.warmth.replicas import HOLD_MS, Promise, Wanted, adjusted, gain_per_ms, needed

SLOTS, PROMISE = 1, Promise(wait_ms=200, share=0.95)


def traffic(load: float) -> Traffic:
    """Service takes 100 ms."""
    return Traffic(load / 100, 100)


def test_the_promise_decides() -> None:
    """Load 0.5: with 1, 0.5 x e^-1 = 18 % late; with 2, C(2, 0.5) x e^(-200 x 1.5 / 100) = 0.1 x e^-3 = 0.5 %."""
    assert needed(traffic(0.5), SLOTS, PROMISE) == 2
    assert needed(traffic(0.5), SLOTS, Promise(200, 0.80)) == 1
    assert needed(traffic(0), SLOTS, PROMISE) == 0


def test_more_at_once() -> None:
    """With the reason."""
    wanted = adjusted(Wanted(1), traffic(0.5), SLOTS, PROMISE, now_ms=0)
    assert wanted.replicas == 2
    assert wanted.reason == "18% would wait over 200 ms with 1, 5% may"


def test_fewer_only_when_they_have_been_enough_for_long() -> None:
    """Load falls from 0.5 to 0.1: 1 would do (1.25 x 0.1: 0.125 x e^(-200 x 0.875 / 100) = 2.2 % late)."""
    wanted = adjusted(Wanted(2), traffic(0.1), SLOTS, PROMISE, now_ms=1_000)
    assert (wanted.replicas, wanted.low_since_ms) == (2, 1_000)
    assert adjusted(wanted, traffic(0.1), SLOTS, PROMISE, 1_000 + HOLD_MS - 1).replicas == 2
    assert adjusted(wanted, traffic(0.1), SLOTS, PROMISE, 1_000 + HOLD_MS).replicas == 1


def test_one_busy_moment_starts_the_wait_again() -> None:
    """The traffic was back: fewer would not have done all the time."""
    wanted = adjusted(Wanted(2), traffic(0.1), SLOTS, PROMISE, 0)
    wanted = adjusted(wanted, traffic(0.5), SLOTS, PROMISE, 200_000)
    assert wanted.low_since_ms == -1
    assert adjusted(wanted, traffic(0.1), SLOTS, PROMISE, HOLD_MS).replicas == 2


def test_the_gain_of_a_replica_is_the_waiting_it_saves() -> None:
    """Load 0.5: the mean wait is 100 ms with one, C(2, 0.5) x 100 / 1.5 = 6.67 ms with two; 0.005 arrivals per ms."""
    assert gain_per_ms(traffic(0.5), SLOTS, 2, wait_ms_most=5_000) == pytest.approx(0.005 * (100 - 6.667), rel=1e-3)
    assert gain_per_ms(traffic(0.5), SLOTS, 1, wait_ms_most=5_000) == pytest.approx(0.005 * (5_000 - 100))

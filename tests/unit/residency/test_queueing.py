"""Waiting for one of several servers, against figures known in closed form."""

import math

import pytest

from services.scheduler.domain.warmth.queueing import Traffic, late_share, wait_ms_mean, waiting_share


def test_one_server_waits_as_m_m_1() -> None:
    """M/M/1 at load 0.5 and service of 100 ms: half wait; mean wait = 0.5 x 100 / (1 - 0.5) = 100 ms."""
    assert waiting_share(1, 0.5) == pytest.approx(0.5)
    assert wait_ms_mean(Traffic(0.005, 100), 1) == pytest.approx(100)


def test_two_servers_wait_as_erlang_says() -> None:
    """C(2, 1) = (1/2)/(1 - 1/2) / (1 + 1 + (1/2)/(1 - 1/2)) = 1 / 3; mean wait = 1/3 x 100 / (2 - 1) = 33.3 ms."""
    assert waiting_share(2, 1.0) == pytest.approx(1 / 3)
    assert wait_ms_mean(Traffic(0.01, 100), 2) == pytest.approx(100 / 3)


def test_constant_service_halves_the_wait() -> None:
    """M/D/1 waits half as long as M/M/1: (1 + 0) / 2."""
    assert wait_ms_mean(Traffic(0.005, 100, variation=0.5), 1) == pytest.approx(50)


def test_the_share_of_the_late_falls_exponentially() -> None:
    """M/M/1 at 0.5: P(W > t) = 0.5 x e^(-t / 200); at 200 ms 0.5 / e."""
    assert late_share(Traffic(0.005, 100), 1, 200) == pytest.approx(0.5 / math.e)


def test_too_few_servers_wait_for_ever() -> None:
    """At load 2 two servers never catch up."""
    busy = Traffic(0.02, 100)
    assert wait_ms_mean(busy, 2) == math.inf
    assert late_share(busy, 2, 10**9) == 1.0


def test_no_traffic_waits_for_nothing() -> None:
    """Not even with no server."""
    assert wait_ms_mean(Traffic(0, 100), 0) == 0
    assert late_share(Traffic(0, 100), 0, 0) == 0

"""What an autoscaler is told."""

import pytest

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.autoscale import ModelSignal, ThrashMeter, pool_signal

A, B = VersionKey("a@1"), VersionKey("b@1")


def signal(version: VersionKey, size: int, replicas: int, wanted: int) -> ModelSignal:
    """One that has and wants so many replicas."""
    return ModelSignal(version, size, 1.0, 10.0, 200, replicas, wanted, "", 0.1, 0, 1_000)


def test_nodes_are_wanted_for_the_bytes_that_are_wanted() -> None:
    """3 x 40 + 1 x 60 = 180 bytes on nodes of 100, filled to 0.9: 2 nodes. One is there: pressure 1.8."""
    pool = pool_signal([signal(A, 40, 1, 3), signal(B, 60, 1, 1)], nodes=1, bytes_per_node=100, thrash_index=0.0)
    assert pool.nodes_wanted == 2
    assert pool.memory_pressure == pytest.approx(1.8)
    assert [model.behind for model in pool.models] == [True, False]


def test_thrash_is_the_share_of_loads_that_undo_an_eviction() -> None:
    """A returns 30 s after it left (within 60 s), B after 10 minutes: 1 of 2 loads."""
    meter = ThrashMeter()
    meter.evicted(A, 0)
    meter.evicted(B, 0)
    meter.loaded(A, load_ms=1_000, at_ms=30_000)
    meter.loaded(B, load_ms=1_000, at_ms=600_000)
    assert meter.index(600_000) == 0.5
    assert meter.loads_per_hour(A) == 1


def test_a_long_load_makes_a_late_return_thrash_too() -> None:
    """A load of a minute: back within ten of them."""
    meter = ThrashMeter()
    meter.evicted(A, 0)
    meter.loaded(A, load_ms=60_000, at_ms=600_000)
    assert meter.index(600_000) == 1.0


def test_an_hour_later_all_is_forgotten() -> None:
    """And the memory with it."""
    meter = ThrashMeter()
    meter.evicted(A, 0)
    meter.evicted(B, 0)
    meter.loaded(A, 1_000, 1_000)
    assert meter.index(3_601_000) == 0.0
    assert not meter.loads
    assert not meter.evicted_ms

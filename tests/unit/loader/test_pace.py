"""The rate of what no request waits for: shared, never saved up, and over at once when somebody waits."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import version_digest, version_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import SystemClock
from roundhouse.errors import Unavailable
from services.loader.adapters.disk_cache import DiskCache
from services.loader.domain.staging_priority import Pace, Priority
from services.loader.operations.traffic import Traffic, TrafficLane
from services.loader.ports import StageRequest

WITHIN_S = 30


def test_chunks_begin_one_after_the_other() -> None:
    """100 bytes a second: chunks of 50 asked for at 10 begin at 10, 10.5, 11; after a pause to 20, at 20."""
    pace, begins = Pace(100), []
    for now_s in (10, 10, 10, 20, 20):
        pace, begins_s = pace.take(50, now_s)
        begins.append(begins_s)
    assert begins == [10, 10.5, 11, 20, 20.5]


def test_no_limit_is_no_pause() -> None:
    """Zero bytes a second means that nobody set one."""
    assert Pace(0).take(10**12, 5) == (Pace(0), 5)


def test_a_demand_is_never_paced_and_a_promotion_ends_the_pause() -> None:
    """A byte a second: a pre-warm's second chunk waits for an hour, until a request joins. A demand's does not wait."""
    traffic, began = Traffic(1), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with traffic.lane(Priority.PREWARM) as lane:
            moving = threads.submit(_two_chunks, lane, began)
            assert began.wait(WITHIN_S)
            assert not moving.done()
            lane.promote(Priority.DEMAND)
            moving.result(WITHIN_S)
        with traffic.lane(Priority.DEMAND) as lane:
            threads.submit(_two_chunks, lane, began).result(WITHIN_S)
            assert not lane.was_paced


def test_who_pauses_is_told_when_nobody_wants_it_any_more() -> None:
    """The lane was left: the thread ends within a moment, not in an hour."""
    traffic, began = Traffic(1), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with traffic.lane(Priority.BACKGROUND) as lane:
            moving = threads.submit(_two_chunks, lane, began)
            assert began.wait(WITHIN_S)
        with pytest.raises(Unavailable):
            moving.result(WITHIN_S)


def test_a_pause_is_no_silence() -> None:
    """While the rate holds a copy up it is not open, so nobody takes its source for dead."""
    traffic, began = Traffic(1), threading.Event()
    with ThreadPoolExecutor(1) as threads, traffic.lane(Priority.PREWARM) as lane:
        assert is_open(lane)
        moving = threads.submit(_two_chunks, lane, began)
        assert began.wait(WITHIN_S)
        until = threading.Event()
        for _ in range(WITHIN_S * 100):
            if not is_open(lane):
                break
            until.wait(0.01)
        assert not is_open(lane)
        assert lane.was_paced
        lane.promote(Priority.DEMAND)
        moving.result(WITHIN_S)
        assert is_open(lane)


async def test_what_is_there_already_takes_nothing_of_the_rate(tmp_path: Path) -> None:
    """A version whose files another one brought is staged although the rate gives a byte a second."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1_000))
    other = tmp_path / "other"
    other.mkdir()
    (other / "same").write_bytes(bytes(1_000))
    cache = DiskCache(tmp_path / "cache", SystemClock())
    await cache.start()
    traffic = Traffic(1)
    for source, priority in ((folder, Priority.DEMAND), (other, Priority.BACKGROUND)):
        files = tuple(
            ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in version_entries(source)
        )
        request = StageRequest(str(source), version_digest(source), files, 1_000)
        with traffic.lane(priority) as lane:
            await cache.stage(request, lane, lambda _: None)
            assert not lane.was_paced
    cache.close()


def is_open(lane: TrafficLane) -> bool:
    """Asked anew each time."""
    return lane.is_open


def _two_chunks(lane: TrafficLane, began: threading.Event) -> None:
    """Of an hour each."""
    lane.wait_in_thread(3_600)
    began.set()
    lane.wait_in_thread(3_600)

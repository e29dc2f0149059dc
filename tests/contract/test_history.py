"""The history in Redis and the one in memory behave alike."""

import itertools
from collections.abc import AsyncIterator

import pytest

from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import PoolName
from services.scheduler.adapters import redis_history
from services.scheduler.adapters.redis_history import RedisHistory
from services.scheduler.domain.records import version_key
from services.scheduler.domain.warmth.history import Entry, Happened
from services.scheduler.ports import History
from tests.fakes.history import InMemoryHistory

pools = itertools.count()
M = version_key("ö@x", "sha256:1")


@pytest.fixture(params=["memory", "redis"])
async def history(request: pytest.FixtureRequest) -> AsyncIterator[History]:
    """Both kinds."""
    if request.param == "memory":
        yield InMemoryHistory()
        return
    redis = open_redis(request.getfixturevalue("redis_url"))
    yield RedisHistory(redis)
    await redis.aclose()


def fresh() -> PoolName:
    """A pool that no other test has."""
    return PoolName(f"history-{next(pools)}")


def entry(at_ms: int, arrivals: int = 1) -> Entry:
    """One model's arrivals."""
    return Entry(at_ms, {M: Happened(arrivals, 2, 300, 40, 2)})


async def test_entries_come_back_whole_in_order_and_once(history: History) -> None:
    """What was read before is not read again; a pool sees its own only."""
    pool, other = fresh(), fresh()
    await history.append(pool, entry(1))
    await history.append(pool, entry(2, arrivals=5))
    await history.append(other, entry(3))
    found, cursor = await history.after(pool, "")
    assert found == (entry(1), entry(2, arrivals=5))
    assert await history.after(pool, cursor) == ((), cursor)
    await history.append(pool, entry(4))
    assert (await history.after(pool, cursor))[0] == (entry(4),)


async def test_an_empty_history_has_nothing(history: History) -> None:
    """The first replica of a new pool starts without a past."""
    assert await history.after(fresh(), "") == ((), "")


async def test_a_long_past_is_read_in_pieces(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five entries, two a read: three reads give all of them, in order."""
    monkeypatch.setattr(redis_history, "READ_MOST", 2)
    redis = open_redis(redis_url)
    history, pool = RedisHistory(redis), fresh()
    for at_ms in range(5):
        await history.append(pool, entry(at_ms))
    cursor, seen = "", list[int]()
    for _ in range(3):
        found, cursor = await history.after(pool, cursor)
        seen += [each.at_ms for each in found]
    assert seen == [0, 1, 2, 3, 4]
    await redis.aclose()

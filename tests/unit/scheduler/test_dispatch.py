"""The dispatcher's turns: who has one, and when. The store is a stand-in that only counts."""

import asyncio
from typing import Any, cast

from roundhouse.vocabulary import Outcome, PoolName
from services.scheduler.domain.records import AttemptId, Ending, NotHeld, Turn, TurnDone
from services.scheduler.domain.records import Taken as Nothing
from services.scheduler.operations.dispatch import Dispatcher
from tests.fakes.clock import ManualClock

LOUD, QUIET = PoolName("loud"), PoolName("quiet")
ENDING = (Ending(AttemptId("r/1"), Outcome.DONE), None)
TURNS_MOST = 50


class BusyStore:
    """While a turn of the loud pool is in the store, the next ending of that pool comes."""

    def __init__(self) -> None:
        self.turns: list[PoolName] = []
        self.more: set[asyncio.Task[Any]] = set()
        self.enough = asyncio.Event()
        self.dispatcher: Dispatcher

    async def turn(self, pool: PoolName, turn: Turn, now_ms: int) -> TurnDone:
        self.turns.append(pool)
        if len(self.turns) == TURNS_MOST:
            self.enough.set()
        elif pool == LOUD:
            self.end_one(LOUD)
        await asyncio.sleep(0)
        return TurnDone(tuple(NotHeld() for _ in turn.endings), (), Nothing())

    def end_one(self, pool: PoolName) -> None:
        ending = Ending(AttemptId(f"{pool}-{len(self.turns)}/1"), Outcome.DONE)
        self.more.add(asyncio.create_task(self.dispatcher.finish(pool, [(ending, None)])))


def start(store: BusyStore) -> "asyncio.Task[None]":
    """A dispatcher over this store, without anything to hand out."""
    nothing = cast("Any", None)
    store.dispatcher = Dispatcher(cast("Any", store), nothing, nothing, nothing, ManualClock(), nothing, cluster="c")
    store.dispatcher.deliver = lambda pool, tickets: None  # type: ignore[method-assign]
    return asyncio.create_task(store.dispatcher.run())


def test_a_pool_that_is_never_still_does_not_keep_another_one_waiting() -> None:
    """However fast the loud pool's events come, the quiet one has its turn at once."""

    async def run() -> list[PoolName]:
        store = BusyStore()
        running = start(store)
        store.end_one(QUIET)
        store.end_one(LOUD)
        await store.enough.wait()
        running.cancel()
        await asyncio.gather(running, *store.more, return_exceptions=True)
        return store.turns

    turns = asyncio.run(run())
    assert QUIET in turns[:2]


class SilentForOne(BusyStore):
    """The server of one pool says nothing; that of the other answers."""

    async def turn(self, pool: PoolName, turn: Turn, now_ms: int) -> TurnDone:
        self.turns.append(pool)
        if pool == LOUD:
            await self.enough.wait()
        return TurnDone(tuple(NotHeld() for _ in turn.endings), (), Nothing())


def test_a_pool_whose_store_is_silent_keeps_no_other_one_waiting() -> None:
    """In a Redis Cluster it lies on another server. Its own turns come one after the other, as ever."""

    async def run() -> None:
        store = SilentForOne()
        running = start(store)
        loud = asyncio.create_task(store.dispatcher.finish(LOUD, [ENDING]))
        await asyncio.sleep(0)
        quiet = asyncio.create_task(store.dispatcher.finish(QUIET, [ENDING]))
        async with asyncio.timeout(30):
            await quiet
        again = asyncio.create_task(store.dispatcher.finish(LOUD, [ENDING]))
        await asyncio.sleep(0)
        assert store.turns == [LOUD, QUIET]
        store.enough.set()
        await asyncio.gather(loud, again)
        assert store.turns == [LOUD, QUIET, LOUD]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())

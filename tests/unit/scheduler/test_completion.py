"""What gateways report of several pools at once. In a Redis Cluster each pool may lie on another server."""

import asyncio
from typing import Any, cast

import pytest

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import PoolName
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.scheduler.domain.records import AttemptId, Ending, Finish, NotHeld, Progress
from services.scheduler.operations.completion import Completion
from tests.fakes.clock import ManualClock

AWAY, WELL = PoolName("away"), PoolName("well")


class HalfAway:
    """Store and dispatcher in one: what lies on the server that is away raises, what lies on the other is noted."""

    def __init__(self) -> None:
        self.renewed: list[AttemptId] = []
        self.ended: list[AttemptId] = []

    async def renew(self, pool: PoolName, leases: list[Progress], now_ms: int) -> tuple[AttemptId, ...]:
        self._look(pool)
        self.renewed += [each.attempt for each in leases]
        return ()

    async def finish(self, pool: PoolName, endings: list[tuple[Ending, object]]) -> tuple[Finish, ...]:
        self._look(pool)
        self.ended += [ending.attempt for ending, _ in endings]
        return tuple(NotHeld() for _ in endings)

    def _look(self, pool: PoolName) -> None:
        if pool == AWAY:
            raise Unavailable("this part of the store is away")


@pytest.mark.parametrize("order", [(AWAY, WELL), (WELL, AWAY)])
def test_a_pool_whose_store_is_away_costs_no_other_pool_its_leases(order: tuple[PoolName, PoolName]) -> None:
    """Else requests that run well elsewhere lapse, are billed as abandoned, and their slots are given away twice."""
    half = HalfAway()
    parts = cast("Any", half)
    completion = Completion(parts, parts, ManualClock(), *[cast("Any", None)] * 4)
    heartbeat = wire.Heartbeat(
        gateway_id="g",
        leases=[wire.LeaseProgress(request_id=f"runs in {pool}", attempt=1, pool=pool) for pool in order],
        finished=[wire.Finished(request_id=f"ended in {pool}", attempt=1, pool=pool) for pool in order],
    )
    with pytest.raises(Unavailable):
        asyncio.run(completion.heartbeat(heartbeat))
    assert half.renewed == [AttemptId("runs in well/1")]
    assert half.ended == [AttemptId("ended in well/1")]


def test_after_the_store_was_away_endings_are_told_it_again() -> None:
    """A primary that died may have taken its last writes along: the heartbeats' repeats go to the new one."""
    half = HalfAway()
    parts = cast("Any", half)
    completion = Completion(parts, parts, ManualClock(), *[cast("Any", None)] * 4)
    ended = wire.Heartbeat(gateway_id="g", finished=[wire.Finished(request_id="r", attempt=1, pool=WELL)])
    lost = wire.Heartbeat(gateway_id="g", leases=[wire.LeaseProgress(request_id="s", attempt=1, pool=AWAY)])

    async def story() -> None:
        for _ in range(2):
            await completion.heartbeat(ended)
        assert half.ended == ["r/1"], "what is known to be settled needs no script"
        with pytest.raises(Unavailable):
            await completion.heartbeat(lost)
        await completion.heartbeat(ended)

    asyncio.run(story())
    assert half.ended == ["r/1", "r/1"]

"""The outbox of usage events, and the patience with clients who do not read. On virtual time."""

import asyncio
from typing import Any

import pytest

from roundhouse.errors import Unavailable
from roundhouse.lifecycle import Lifecycle
from roundhouse.wire.v1.usage_pb2 import UsageData, UsageEvent
from services.gateway.adapters.client_connection import Sender, while_connected
from services.gateway.adapters.usage_outbox import UsageOutbox
from services.gateway.operations.shielding import finished_anyway
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus


def event(number: int) -> UsageEvent:
    """One event."""
    return UsageEvent(id=f"r{number}/1", source="c", subject="t1", data=UsageData(emitter="gateway"))


def test_events_wait_for_the_stream_and_arrive_once() -> None:
    """Three events, one recorded twice, while the bus is away for 5 s: then three messages, and the outbox is empty."""

    async def scenario() -> None:
        bus = FakeBus()
        bus.connected = False
        outbox = UsageOutbox(bus, events_max=3)
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            outbox.start(lifecycle, VirtualClock())
            for number in (1, 2, 3, 3):
                await outbox.record(event(number))
            full = not outbox.has_room
            await asyncio.sleep(5)
            assert len(outbox) == 3
            bus.connected = True
            assert await outbox.drain(10) == 0
            lifecycle.cancel_tasks()
        assert full
        assert sorted(bus.durable) == ["r1/1/gateway", "r2/1/gateway", "r3/1/gateway"]

    run_virtual(scenario())


def test_the_first_event_leaves_at_once_and_those_behind_it_together() -> None:
    """A message wakes three processes. After a pause an event is published at once; three that come within the next
    50 ms leave together at its end; a drain waits for none of it."""

    async def scenario() -> None:
        bus = FakeBus()
        outbox = UsageOutbox(bus)
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            outbox.start(lifecycle, VirtualClock())
            await outbox.record(event(1))
            await asyncio.sleep(0.001)
            assert len(bus.durable) == 1
            for number in (2, 3, 4):
                await outbox.record(event(number))
            await asyncio.sleep(0.045)
            assert len(bus.durable) == 1
            await asyncio.sleep(0.005)
            assert len(bus.durable) == 4
            await outbox.record(event(5))
            begun = asyncio.get_running_loop().time()
            assert await outbox.drain(10) == 0
            assert asyncio.get_running_loop().time() - begun < 0.01
            lifecycle.cancel_tasks()
        assert len(bus.durable) == 5

    run_virtual(scenario())


def test_a_drain_is_bounded() -> None:
    """A bus that does not come back costs 5 s and the count of what is lost is told."""

    async def scenario() -> None:
        bus = FakeBus()
        bus.connected = False
        outbox = UsageOutbox(bus)
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            outbox.start(lifecycle, VirtualClock())
            await outbox.record(event(1))
            assert await outbox.drain(5) == 1
            lifecycle.cancel_tasks()

    run_virtual(scenario())


async def _never(*_: Any) -> Any:
    await asyncio.Event().wait()


def test_a_client_who_reads_nothing_is_gone_within_a_minute() -> None:
    """Case B32 (b): one piece is stuck; after 30 s to 60 s the work is cancelled."""

    async def scenario() -> None:
        sender = Sender(_never)
        cancelled: list[float] = []

        async def work() -> None:
            try:
                await sender.body(b"x")
            except asyncio.CancelledError:
                cancelled.append(asyncio.get_running_loop().time())
                raise

        await while_connected(_never, work(), sender)
        assert 30 <= cancelled[0] <= 60

    run_virtual(scenario())


def test_a_client_who_reads_slowly_is_not_gone() -> None:
    """A piece every 20 s for ten minutes is a slow reader, not one who left; so is a long wait between pieces."""

    async def scenario() -> None:
        async def slow(_: Any) -> None:
            await asyncio.sleep(20)

        sender = Sender(slow)
        done: list[bool] = []

        async def work() -> None:
            for _ in range(30):
                await sender.body(b"x")
            await asyncio.sleep(300)
            done.append(True)

        await while_connected(_never, work(), sender)
        assert done == [True]

    run_virtual(scenario())


def test_a_client_who_disconnects_cancels_the_work_and_waits_for_its_clean_up() -> None:
    """The clean-up of one second is over when the call returns."""

    async def scenario() -> None:
        async def receive() -> Any:
            await asyncio.sleep(3)
            return {"type": "http.disconnect"}

        cleaned: list[float] = []

        async def work() -> None:
            try:
                await _never()
            finally:
                await finished_anyway(asyncio.sleep(1))
                cleaned.append(asyncio.get_running_loop().time())

        await while_connected(receive, work(), Sender(_never))
        assert cleaned == [pytest.approx(4)]

    run_virtual(scenario())


def test_a_finishing_write_survives_repeated_cancellation() -> None:
    """Cancelled three times, it still ends, and the caller then hears of the cancellation."""

    async def scenario() -> None:
        written: list[str] = []

        async def write() -> None:
            await asyncio.sleep(1)
            written.append("done")

        task = asyncio.create_task(finished_anyway(write()))
        for _ in range(3):
            await asyncio.sleep(0.1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert written == ["done"]

        async def fail() -> None:
            raise Unavailable("away")

        with pytest.raises(Unavailable):
            await finished_anyway(fail())

    run_virtual(scenario())

"""What every `SchedulerGateway` promises: the one over the bus, and the fake that stands in for it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from roundhouse.errors import Unavailable
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.adapters.scheduler_bus import BusScheduler, receive_grants
from services.gateway.operations.attempts import Attempts
from services.gateway.ports import SchedulerGateway
from tests.fakes.clock import ManualClock
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduler_gateway import FakeScheduler
from tests.integration.gateway import bus_scheduler
from tests.integration.gateway.running_gateway import UNUSED_PLACEMENT, until

REQUEST = wire.SubmitRequest(request_id="r1", attempt=1, gateway_id="g1")


@dataclass
class Side:
    """A scheduler seen from the gateway, and what it has heard."""

    gateway: SchedulerGateway
    heard: Any  # FakeScheduler or the scheduler on the bus: both keep what they hear under the same names
    leave: Callable[[], Any]


@pytest.fixture(params=["fake", "bus"])
async def side(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    """Both kinds, with a scheduler that accepts and does not grant."""
    if request.param == "fake":
        fake = FakeScheduler(Attempts("g1"), grants_at_once=False)

        async def leave() -> None:
            fake.away = True

        yield Side(fake, fake, leave)
        return
    bus = FakeBus()
    scheduler = bus_scheduler.BusScheduler(bus, UNUSED_PLACEMENT, grants_at_once=False)
    await scheduler.start()
    grants = await receive_grants(bus, "g1", Attempts("g1"))
    yield Side(BusScheduler(bus, "g1", ManualClock()), scheduler, scheduler.stop)
    await grants.stop()


async def test_a_submit_is_answered_with_a_decision(side: Side) -> None:
    """Accepted with an estimate, or refused with a reason."""
    reply = await side.gateway.submit(REQUEST, timeout_ms=2_000)
    assert reply.accepted.estimated_wait_ms > 0
    assert side.heard.submitted == [REQUEST]
    side.heard.refused = wire.Refused(reason=wire.Refused.REASON_QUEUE_FULL)
    assert (await side.gateway.submit(REQUEST, timeout_ms=2_000)).refused.reason == wire.Refused.REASON_QUEUE_FULL


async def test_what_is_told_is_heard(side: Side) -> None:
    """Cancel, finish, heartbeat and the loss of a node arrive as they were sent."""
    cancel = wire.Cancel(request_id="r1", attempt=1)
    finished = wire.Finished(request_id="r1", attempt=1, output_tokens=3)
    heartbeat = wire.Heartbeat(gateway_id="g1", finished=[finished])
    await side.gateway.cancel(cancel)
    await side.gateway.finished(finished)
    await side.gateway.heartbeat(heartbeat)
    await side.gateway.lost("node-1")
    await until(lambda: bool(side.heard.cancelled and side.heard.finishes and side.heard.heartbeats))
    await until(lambda: side.heard.nodes_lost == ["node-1"])
    assert side.heard.cancelled == [cancel]
    assert side.heard.finishes == [finished]
    assert side.heard.heartbeats == [heartbeat]


async def test_nobody_there_is_unavailable(side: Side) -> None:
    """A submit does not wait for a scheduler that is away."""
    await side.leave()
    with pytest.raises(Unavailable):
        await side.gateway.submit(REQUEST, timeout_ms=2_000)


async def test_a_grant_that_nobody_waits_for_is_not_wanted(side: Side) -> None:
    """The lease ends at once."""
    await side.gateway.submit(REQUEST, timeout_ms=2_000)
    granted = side.heard.grant(side.heard.submitted[0])
    assert (granted if isinstance(granted, bool) else await granted) is False

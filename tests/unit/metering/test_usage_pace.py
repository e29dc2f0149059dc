"""How often the recorder's stream hands over events when few come. On virtual time, without a server."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from nats.aio.msg import Msg

from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1.usage_pb2 import UsageData, UsageEvent
from services.metering.adapters.usage_stream import GATHER_S, TRICKLE_EVENTS, JetStreamUsage
from tests.fakes.clock import run_virtual


class QuietBus:
    """A connection whose server says only what the test says."""

    def __init__(self) -> None:
        self.connected = True
        self.jetstream = SimpleNamespace(add_consumer=self._nothing, consumer_info=self._nothing)
        self.client: Any = self
        self.deliver: Any = None

    def on_reconnected(self, callback: object) -> None:
        """Never."""

    async def ensure_streams(self) -> None:
        """They are there."""

    def new_inbox(self) -> str:
        """An address."""
        return "_INBOX.1"

    async def subscribe(self, _subject: str, *, cb: Any) -> object:
        """Keep whom to deliver to."""
        self.deliver = cb
        return object()

    async def publish(self, *_: object, **__: object) -> None:
        """Requests for more are heard and not answered."""

    async def _nothing(self, *_: object) -> None:
        return None


def message(number: int) -> Msg:
    """One event as the server delivers it."""
    event = UsageEvent(id=f"r{number}/1", source="c", subject="t1", data=UsageData(emitter="gateway"))
    return Msg(cast("Any", None), subject="rh.v1.usage.t1", data=event.SerializeToString())


def test_the_first_event_is_handed_over_at_once_and_a_trickle_four_times_a_second() -> None:
    """One event after a pause: at once. Ten that come within the next 100 ms: together, a quarter of a second after
    it. 256 at hand: without a wait."""

    async def scenario() -> None:
        bus = QuietBus()
        stream = JetStreamUsage(cast("NatsBus", bus))
        time = asyncio.get_running_loop().time
        pulling = asyncio.create_task(stream.pull(limit=1024))
        await asyncio.sleep(0.5)
        first = time()
        await bus.deliver(message(0))
        assert len(await pulling) == 1
        assert time() - first < 0.001
        pulling = asyncio.create_task(stream.pull(limit=1024))
        for number in range(10):
            await asyncio.sleep(0.01)
            await bus.deliver(message(number))
        assert len(await pulling) == 10
        assert abs(time() - first - GATHER_S) < 0.001
        for number in range(TRICKLE_EVENTS):
            await bus.deliver(message(number))
        begun = time()
        assert len(await stream.pull(limit=1024)) == TRICKLE_EVENTS
        assert time() - begun < 0.001

    run_virtual(scenario())

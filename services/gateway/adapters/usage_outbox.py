"""`UsageSink` that keeps events in memory until JetStream has them.

Invariant 13 and 14 need every event to arrive at least once: publishing is repeated until it is acknowledged, and the
event's id makes repetitions harmless. While `EVENTS_MAX` events wait, `has_room` is False and new requests are refused,
because losing a bill is worse than refusing work. What is in memory is lost with the process: then the scheduler
settles from the last heartbeat. Decision: docs/decisions/0092-usage-outbox.md.
"""

import asyncio
import random

import structlog

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.lifecycle import Lifecycle
from roundhouse.wire.v1.usage_pb2 import UsageEvent

log = structlog.get_logger(__name__)

EVENTS_MAX = 20_000  # about 10 MB; a minute of a busy gateway
PUBLISHERS = 16  # JetStream takes 11,000/s with many in flight, 3,600/s one at a time
RETRY_S_MIN, RETRY_S_MAX = 0.1, 2.0


class UsageOutbox:
    """See the module. `start` it, and `drain` it before the bus closes."""

    def __init__(self, bus: EventBus, *, events_max: int = EVENTS_MAX) -> None:
        self._bus = bus
        self._events_max = events_max
        self._held: set[str] = set()  # ids that the stream does not have yet
        self._waiting: asyncio.Queue[UsageEvent] = asyncio.Queue()  # bounded by `has_room`, never by losing an event
        self._drained = asyncio.Event()
        self._drained.set()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        """See `UsageSink.has_room`."""
        return len(self._held) < self._events_max

    async def record(self, event: UsageEvent) -> None:
        """See `UsageSink.record`."""
        if event.id in self._held:
            return
        self._held.add(event.id)
        self._drained.clear()
        self._waiting.put_nowait(event)

    def start(self, lifecycle: Lifecycle) -> None:
        """Publish in the background until the process stops."""
        for number in range(PUBLISHERS):
            lifecycle.spawn(self._publish_forever(), f"usage_outbox_{number}")

    async def drain(self, timeout_s: float) -> int:
        """Wait until the stream has everything; returns how many events are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            log.error("usage_events_lost", events=len(self._held))
        return len(self._held)

    async def _publish_forever(self) -> None:
        while True:
            event = await self._waiting.get()
            await self._publish(event)
            self._held.discard(event.id)
            if not self._held:
                self._drained.set()

    async def _publish(self, event: UsageEvent) -> None:
        # The emitter is part of the message id: the stream must not take this event for a repetition of the
        # scheduler's settlement of the same attempt, which it supersedes.
        message_id = f"{event.id}/{event.data.emitter}"
        data, subject, wait_s = event.SerializeToString(), subjects.usage(event.subject), RETRY_S_MIN
        while True:
            try:
                await self._bus.publish_durable(subject, data, message_id=message_id)
                return
            except Unavailable:
                log.warning("usage_event_delayed", event_id=event.id)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1))  # noqa: S311 - jitter, not a secret
            wait_s = min(wait_s * 2, RETRY_S_MAX)

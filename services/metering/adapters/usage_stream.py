"""`UsageStream` on a durable JetStream pull consumer that several metering processes share.

It never goes quiet (case B38): every pull is a new request, a reconnection forgets the old subscription, and an idle
consumer is looked up now and then, because a server that came back empty knows neither stream nor consumer and does not
say so. Acknowledgements of deliveries from before a reconnection are dropped: an empty server counts from 1 again, and
an old acknowledgement could hit a new event. Dropped ones come again and are duplicates.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.errors import Error as JetStreamError

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus
from services.metering.adapters.usage_wire import decode_event
from services.metering.domain.ledger import RawEvent
from services.metering.ports import Delivery

log = structlog.get_logger(__name__)

CONSUMER: Final = "metering"
PULL_WAIT_S: Final = 1.0  # also how long a stop waits for an idle pull
IDLE_PULLS_BEFORE_LOOK: Final = 3  # with PULL_WAIT_S: a forgotten consumer is missed within about 3 s
ACK_WAIT_S: Final = 10.0  # many times a slow commit; then events of a process that died go to another
ACK_PENDING_MAX: Final = 8192  # far above the batches in flight of a few processes
_ERRORS: Final = (NatsError, JetStreamError, TimeoutError)


@dataclass(frozen=True, slots=True)
class _Token:
    epoch: int
    message: Msg


class JetStreamUsage:
    """See `ports.UsageStream`."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._subscription: Any = None  # nats-py ships no types
        self._epoch = 0
        self._idle_pulls = 0
        bus.on_reconnected(self._forget)

    async def pull(self, *, limit: int) -> Sequence[Delivery]:
        """See `UsageStream.pull`."""
        if not self._bus.connected:
            raise Unavailable("the bus is away")
        try:
            if self._subscription is None:
                self._subscription = await self._bind()
            epoch = self._epoch
            messages = await self._fetch(limit)
        except _ERRORS as error:
            await self._forget()
            raise Unavailable("the usage stream does not answer") from error
        return [_delivery(message, epoch) for message in messages]

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """See `UsageStream.acknowledge`."""
        for delivery in deliveries:
            token = delivery.token
            assert isinstance(token, _Token)
            if token.epoch != self._epoch or not self._bus.connected:
                log.info("usage_acknowledgement_dropped", reason="the connection is not the one it came over")
                return
            try:
                await token.message.ack()
            except NatsError as error:
                raise Unavailable("the bus takes no acknowledgement now") from error

    async def pending(self) -> int:
        """See `UsageStream.pending`."""
        try:
            info = await self._bus.jetstream.consumer_info(subjects.USAGE_STREAM, CONSUMER)
        except _ERRORS as error:
            raise Unavailable("the usage stream does not answer") from error
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def _bind(self) -> Any:
        await self._bus.ensure_streams()
        await self._ensure_consumer()
        return await self._bus.jetstream.pull_subscribe_bind(consumer=CONSUMER, stream=subjects.USAGE_STREAM)

    async def _ensure_consumer(self) -> ConsumerInfo:
        config = ConsumerConfig(
            durable_name=CONSUMER,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,  # what can never be recorded goes to the quarantine, so nothing is retried for ever
            max_ack_pending=ACK_PENDING_MAX,
        )
        return await self._bus.jetstream.add_consumer(subjects.USAGE_STREAM, config)

    async def _fetch(self, limit: int) -> Sequence[Msg]:
        try:
            messages: list[Msg] = await self._subscription.fetch(limit, timeout=PULL_WAIT_S)
        except TimeoutError:
            messages = []
        if messages:
            self._idle_pulls = 0
            return messages
        self._idle_pulls += 1
        if self._idle_pulls >= IDLE_PULLS_BEFORE_LOOK:
            self._idle_pulls = 0
            await self._bus.jetstream.consumer_info(subjects.USAGE_STREAM, CONSUMER)
        return ()

    async def _forget(self) -> None:
        self._epoch += 1
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return
        try:
            async with asyncio.timeout(PULL_WAIT_S):
                await subscription.unsubscribe()
        except _ERRORS:
            log.debug("usage_unsubscribe_failed")


def _delivery(message: Msg, epoch: int) -> Delivery:
    data = bytes(message.data)
    return Delivery(decode_event(message.subject, data), RawEvent(message.subject, data), _Token(epoch, message))

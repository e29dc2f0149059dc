"""`UsageStream` on a durable JetStream pull consumer that several metering processes share.

It asks for the next batches while one is being recorded, so the server's work and ours overlap. It never goes quiet
(case B38): requests expire, a reconnection forgets the old subscription, and an idle consumer is looked up now and
then, because a server that came back empty knows neither stream nor consumer and does not say so. Acknowledgements of
deliveries from before a reconnection are dropped: an empty server counts from 1 again, and an old acknowledgement could
hit a new event. Dropped ones come again and are duplicates. Decision: docs/decisions/0072-usage-consumer.md.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import structlog
from msgspec import Struct
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
PULL_WAIT_S: Final = 1.0  # how long a request waits for its first event, and a stop for an idle pull
IDLE_PULLS_BEFORE_LOOK: Final = 3  # with PULL_WAIT_S: a forgotten consumer is missed within about 3 s
GATHER_S: Final = 0.25  # between two commits of a trickle: four a second cost little, and a row is no later than that
TRICKLE_EVENTS: Final = 256  # with as many at hand a commit is shared well enough
BATCHES_AHEAD: Final = 2  # one to take at once, one on its way
ACK_WAIT_S: Final = 10.0  # many times a slow commit; then events of a process that died go to another
ACK_PENDING_MAX: Final = 8192  # far above the batches in flight of a few processes
_NEXT: Final = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.USAGE_STREAM}.{CONSUMER}"
_REQUEST_ENDED: Final = frozenset({"404", "408"})  # no messages, expired: not a fault
_ERRORS: Final = (NatsError, JetStreamError, TimeoutError)


class _Token(Struct, frozen=True):
    epoch: int
    message: Msg


class JetStreamUsage:
    """See `ports.UsageStream`. Call `close` before the bus is closed."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._subscription: Any = None  # nats-py ships no types
        self._inbox = ""
        self._arrived: deque[Msg] = deque()
        self._news = asyncio.Event()
        self._asked = 0  # messages that the server may still send for our requests
        self._fault: str | None = None
        self._epoch = 0
        self._idle_pulls = 0
        self._taken_at = -GATHER_S
        bus.on_reconnected(self._forget)

    async def pull(self, *, limit: int) -> Sequence[Delivery]:
        """See `UsageStream.pull`. As many again may already be on their way."""
        if not self._bus.connected:
            raise Unavailable("the bus is away")
        try:
            if self._subscription is None:
                await self._bind()
            epoch = self._epoch
            messages = await self._take(limit)
        except _ERRORS as error:
            await self._forget()
            raise Unavailable("the usage stream does not answer") from error
        return [_delivery(message, epoch) for message in messages]

    async def close(self) -> None:
        """Give back what was pulled ahead, for whoever pulls next. Idempotent."""
        given_back = list(self._arrived)
        await self._forget()
        try:
            for message in given_back:
                await message.nak()
        except NatsError:
            log.debug("usage_not_given_back", events=len(given_back))  # comes again after the acknowledgement wait

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

    async def _bind(self) -> None:
        await self._bus.ensure_streams()
        await self._ensure_consumer()
        self._inbox = self._bus.client.new_inbox()
        self._subscription = await self._bus.client.subscribe(self._inbox, cb=self._on_message)

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

    async def _take(self, limit: int) -> list[Msg]:
        """What has arrived; waits up to `PULL_WAIT_S` for a first message. Few are taken once in `GATHER_S`: the first
        after a pause at once, those that follow together.

        Asks ahead for the next batch."""
        await self._ask(limit)
        if not self._arrived:
            await self._wait()
        if 0 < len(self._arrived) < min(limit, TRICKLE_EVENTS):
            await asyncio.sleep(self._taken_at + GATHER_S - asyncio.get_running_loop().time())
        taken = [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]
        if taken:
            self._idle_pulls, self._taken_at = 0, asyncio.get_running_loop().time()
            await self._ask(limit)
        else:
            await self._look_if_idle()
        return taken

    async def _ask(self, limit: int) -> None:
        if self._asked + len(self._arrived) >= BATCHES_AHEAD * limit:
            return
        self._asked += limit
        request = {"batch": limit, "expires": round(PULL_WAIT_S * 1e9)}
        await self._bus.client.publish(_NEXT, json.dumps(request).encode(), reply=self._inbox)

    async def _wait(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(PULL_WAIT_S):
                await self._news.wait()
        except TimeoutError:
            self._asked = 0  # the request has expired by now, whether or not the server said so
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise JetStreamError(fault)

    async def _look_if_idle(self) -> None:
        self._idle_pulls += 1
        if self._idle_pulls >= IDLE_PULLS_BEFORE_LOOK:
            self._idle_pulls = 0
            await self._bus.jetstream.consumer_info(subjects.USAGE_STREAM, CONSUMER)

    async def _on_message(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            self._asked = max(0, self._asked - 1)
            self._arrived.append(message)
        elif status in _REQUEST_ENDED:
            self._asked = max(0, self._asked - int(headers.get("Nats-Pending-Messages", self._asked)))
        else:
            self._asked = 0
            self._fault = f"the server ended the request with status {status}"
        self._news.set()

    async def _forget(self) -> None:
        self._epoch += 1
        self._asked = 0
        self._arrived.clear()
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

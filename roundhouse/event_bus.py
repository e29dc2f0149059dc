"""The bus: publish, request, subscribe and durable publish over NATS, with trace context in the headers.

Tokens never cross it; it carries decisions and events. A lost connection is retried for ever; publishes made meanwhile
are kept by the client up to its buffer limit. Requests and durable publishes raise `Unavailable` instead of waiting
longer than their timeout. The in-memory twin for tests is `tests/fakes/event_bus.py`; both pass
`tests/contract/test_event_bus.py`. Decision: docs/decisions/0004-bus.md.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import Error as JetStreamError

from roundhouse import subjects, telemetry
from roundhouse.bus_client import BusClient
from roundhouse.errors import Unavailable

log = structlog.get_logger(__name__)

RECONNECT_WAIT_S = 0.25  # a restarted server is found again within half a second
PENDING_BYTES = 8 * 1024 * 1024  # what publishes may pile up to while the server is away
REQUEST_TIMEOUT_MS = 2_000
DURABLE_TIMEOUT_MS = 2_000
NO_RESPONDERS = "503"  # the status of the server's answer to a request that nobody listens for


class _PublishAck(msgspec.Struct):
    """JetStream's answer to a publish."""

    stream: str = ""
    error: dict[str, Any] | None = None


_decode_ack = msgspec.json.Decoder(_PublishAck).decode


@dataclass(frozen=True, slots=True)
class Message:
    """One delivered message."""

    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[Message], Awaitable[bytes | None]]
"""Gets a message; what it returns is sent to the requester, None sends nothing."""

AT_ONCE = 0
"""`concurrency` of a handler that never waits: it runs where the message is read, without a task or a span. What it
returns leaves with the next message of this process, or after `LINGER_S`: nobody should wait for it."""
LINGER_S = 0.01  # short beside the time after which an unanswered message is sent again


class Subscription(Protocol):
    """A running subscription."""

    async def stop(self) -> None:
        """Stop taking messages and wait for running handlers. Idempotent."""
        ...


class EventBus(Protocol):
    """What services need of a bus."""

    @property
    def connected(self) -> bool:
        """Whether the server answers now."""
        ...

    async def publish(self, subject: str, data: bytes) -> None:
        """Send at most once. Raises Unavailable if the client's buffer is full."""
        ...

    async def request(self, subject: str, data: bytes, *, timeout_ms: int = REQUEST_TIMEOUT_MS) -> bytes:
        """Send and wait for one reply. Raises Unavailable on time-out and when nobody listens."""
        ...

    async def publish_durable(self, subject: str, data: bytes, *, message_id: str) -> None:
        """Send into a JetStream stream; returns once the stream has it. Raises Unavailable otherwise.

        Idempotent by `message_id` within the stream's duplicate window (a help, never the guarantee)."""
        ...

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "", concurrency: int = 1) -> Subscription:
        """Run `handler` for each message, at most `concurrency` at once; members of a group share the messages.

        `AT_ONCE` is for handlers that never wait."""
        ...


class NatsBus:
    """`EventBus` on one NATS connection. Use `NatsBus.connect`."""

    def __init__(self, client: BusClient) -> None:
        self._client = client
        self._jetstream: JetStreamContext = client.jetstream()
        self._reconnected: list[Callable[[], Awaitable[None]]] = []
        self._inbox = ""  # where replies to our requests come
        self._replies: dict[str, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._lingering: list[tuple[str, bytes]] = []  # answers that wait for company
        self._rings: asyncio.TimerHandle | None = None  # when they leave without it
        self._leaving: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, *, name: str) -> "NatsBus":
        """Connect, waiting up to 10 s for the server. Raises Unavailable."""
        client = BusClient()
        bus = cls(client)
        try:
            async with asyncio.timeout(10):
                await client.connect(
                    url,
                    name=name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # floats work, the stub says int
                    pending_size=PENDING_BYTES,
                    ping_interval=5,
                    skip_subject_validation=True,  # ours are made by `subjects`
                    error_cb=bus._on_error,
                    disconnected_cb=bus._on_disconnected,
                    reconnected_cb=bus._on_reconnected,
                )
        except (NatsError, OSError, TimeoutError) as error:
            raise Unavailable(f"NATS does not answer at {url}") from error
        return bus

    @property
    def connected(self) -> bool:
        """Whether the server answers now."""
        return bool(self._client.is_connected)

    @property
    def client(self) -> Client:
        """The connection itself, for adapters that speak more of NATS than this port, such as pull requests."""
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        """The JetStream context, for consumers and key-value buckets."""
        return self._jetstream

    def on_reconnected(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Run `callback` after each reconnection, for what a restarted server may have forgotten."""
        self._reconnected.append(callback)

    async def publish(self, subject: str, data: bytes) -> None:
        """See `EventBus.publish`."""
        try:
            if self._lingering:
                await self._send_lingering()
            await self._client.publish(subject, data, headers=telemetry.trace_headers())
        except NatsError as error:
            raise Unavailable("the bus takes no message now") from error

    async def request(self, subject: str, data: bytes, *, timeout_ms: int = REQUEST_TIMEOUT_MS) -> bytes:
        """See `EventBus.request`."""
        return await self._asked(subject, data, telemetry.trace_headers(), timeout_ms)

    async def publish_durable(self, subject: str, data: bytes, *, message_id: str) -> None:
        """See `EventBus.publish_durable`."""
        headers = {"Nats-Msg-Id": message_id, **(telemetry.trace_headers() or {})}
        answer = await self._asked(subject, data, headers, DURABLE_TIMEOUT_MS)
        try:
            acknowledged = _decode_ack(answer)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the stream behind {subject} answered what cannot be read") from error
        if acknowledged.error is not None or not acknowledged.stream:
            raise Unavailable(f"the stream behind {subject} takes no message now")

    async def _asked(self, subject: str, data: bytes, headers: dict[str, str] | None, timeout_ms: int) -> bytes:
        """Publish with a reply address of our own and wait for the one reply. nats-py's `request` costs twice as much.

        Raises Unavailable."""
        loop = asyncio.get_running_loop()
        token = str(next(self._numbers))
        reply: asyncio.Future[bytes] = loop.create_future()
        self._replies[token] = reply
        timer = loop.call_later(timeout_ms / 1000, _expire, reply)
        try:
            if not self._inbox:
                await self._open_inbox()
            if self._lingering:
                await self._send_lingering()
            await self._client.publish(subject, data, f"{self._inbox}.{token}", headers)
            return await reply
        except (NatsError, TimeoutError) as error:
            raise Unavailable(f"no answer on {subject} within {timeout_ms} ms") from error
        finally:
            timer.cancel()
            del self._replies[token]

    def _answer_later(self, subject: str, data: bytes) -> None:
        self._lingering.append((subject, data))
        if self._rings is None:
            self._rings = asyncio.get_running_loop().call_later(LINGER_S, self._leave)

    def _leave(self) -> None:
        self._leaving = asyncio.create_task(self._send_alone())

    async def _send_alone(self) -> None:
        try:
            await self._send_lingering()
        except NatsError:
            log.debug("bus_answer_failed")  # whoever asked asks again

    async def _send_lingering(self) -> None:
        if self._rings is not None:
            self._rings.cancel()
            self._rings = None
        answers, self._lingering = self._lingering, []
        for subject, data in answers:
            await self._client.publish(subject, data)

    async def _open_inbox(self) -> None:
        inbox = self._inbox = str(self._client.new_inbox())
        try:
            await self._client.subscribe_at_once(f"{inbox}.*", self._take_reply, otherwise=self._on_reply)
        except BaseException:
            self._inbox = ""
            raise

    def _take_reply(self, subject: str, data: bytes, _reply: str) -> None:
        reply = self._replies.get(subject.rpartition(".")[2])
        if reply is not None and not reply.done():  # else it came too late
            reply.set_result(data)

    async def _on_reply(self, message: Msg) -> None:
        reply = self._replies.get(message.subject.rpartition(".")[2])
        if reply is None or reply.done():
            return  # it came too late
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            reply.set_exception(Unavailable("nobody listens"))
        else:
            reply.set_result(bytes(message.data))

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "", concurrency: int = 1) -> Subscription:
        """See `EventBus.subscribe`."""
        running = _RunningHandlers(handler, concurrency, self._answer_later)
        if concurrency == AT_ONCE:
            running.subscription = await self._client.subscribe_at_once(
                subject, running.take, otherwise=running.at_once, queue=group
            )
        else:
            running.subscription = await self._client.subscribe(subject, queue=group, cb=running.on_message)
        return running

    async def ensure_streams(self) -> None:
        """Create the USAGE, BILLING, AUDIT and ERASURES streams where they are missing. Idempotent."""
        for name, pattern in (
            (subjects.USAGE_STREAM, subjects.USAGE_SUBJECTS),
            (subjects.BILLING_STREAM, subjects.BILLING_SUBJECTS),
            (subjects.AUDIT_STREAM, subjects.AUDIT_SUBJECTS),
            (subjects.ERASURES_STREAM, subjects.ERASURES),
        ):
            config = StreamConfig(
                name=name, subjects=[pattern], storage=StorageType.FILE, retention=RetentionPolicy.LIMITS
            )
            try:
                await self._jetstream.add_stream(config)
            except (NatsError, JetStreamError, TimeoutError) as error:
                raise Unavailable(f"JetStream does not make the stream {name}") from error

    async def close(self) -> None:
        """Flush what is buffered (bounded) and disconnect. Idempotent."""
        if self._client.is_closed:
            return
        try:
            if self._client.is_connected:
                await self._client.flush(timeout=2)
        except (NatsError, TimeoutError):
            log.warning("bus_flush_failed", action="close")
        try:
            await self._client.close()
        except (NatsError, OSError):
            log.warning("bus_close_failed", action="close")  # the server was away: there is nothing left to close

    async def _on_error(self, error: Exception) -> None:
        log.warning("bus_error", error=type(error).__name__)

    async def _on_disconnected(self) -> None:
        log.warning("bus_disconnected")

    async def _on_reconnected(self) -> None:
        log.info("bus_reconnected")
        for callback in self._reconnected:
            try:
                await callback()
            except Unavailable as error:
                log.warning("bus_reconnect_callback_failed", error=error.message)


def _expire(reply: "asyncio.Future[bytes]") -> None:
    if not reply.done():
        reply.set_exception(TimeoutError())


class _RunningHandlers:
    """Bounds and tracks the handlers of one subscription.

    The client delivers one message at a time; waiting for a permit here is what pushes back on it."""

    def __init__(self, handler: Handler, concurrency: int, answer_later: Callable[[str, bytes], None]) -> None:
        self._handler = handler
        self._answer_later = answer_later
        self._permits = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self.subscription: Any = None  # nats-py ships no types

    async def on_message(self, message: Msg) -> None:
        await self._permits.acquire()
        task = asyncio.create_task(self._run(message))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def take(self, subject: str, data: bytes, reply: str) -> None:
        handling = self._handled(subject, data, {})
        try:
            handling.send(None)
        except StopIteration as done:
            if done.value is not None and reply:
                self._answer_later(reply, done.value)
        else:
            handling.close()
            log.error("bus_handler_waits", subject=_span_subject(subject))

    async def at_once(self, message: Msg) -> None:
        answer = await self._handled(message.subject, bytes(message.data), dict(message.headers or {}))
        if answer is not None and message.reply:
            self._answer_later(message.reply, answer)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._permits.release()

    async def _run(self, message: Msg) -> None:
        headers = dict(message.headers or {})
        with telemetry.consumer_span(f"receive {_span_subject(message.subject)}", headers):
            await self._answer(message, headers)

    async def _answer(self, message: Msg, headers: dict[str, str]) -> None:
        answer = await self._handled(message.subject, bytes(message.data), headers)
        if answer is not None and message.reply:
            try:
                await message.respond(answer)
            except NatsError:
                log.warning("bus_answer_failed", subject=_span_subject(message.subject))

    async def _handled(self, subject: str, data: bytes, headers: dict[str, str]) -> bytes | None:
        try:
            return await self._handler(Message(subject, data, headers))
        except Exception as error:
            log.error(
                "bus_handler_failed",
                subject=_span_subject(subject),
                error=type(error).__name__,
                exc_info=True,
            )
            return None

    async def stop(self) -> None:
        try:
            await self.subscription.unsubscribe()
        except NatsError:
            log.debug("bus_unsubscribe_failed")
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5)


def _span_subject(subject: str) -> str:
    """A subject without its ids: span names must not grow with callers."""
    parts = subject.split(".")
    return ".".join([*parts[:3], "*", *parts[4:]]) if len(parts) > 4 else ".".join(parts[:3])


async def connect_bus(url: str, *, name: str) -> NatsBus:
    """Connect and make sure that the streams exist, now and after every reconnection."""
    bus = await NatsBus.connect(url, name=name)
    await bus.ensure_streams()
    bus.on_reconnected(bus.ensure_streams)
    return bus

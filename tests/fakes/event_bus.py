"""An in-memory bus with the same behaviour as `NatsBus`; faults are set, never random by themselves.

Passes `tests/contract/test_event_bus.py` as the real one does. `loss` lets the simulation drop or repeat messages.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from roundhouse.errors import Unavailable
from roundhouse.event_bus import REQUEST_TIMEOUT_MS, Handler, Message, Subscription

Deliveries = Callable[[str], int]
"""Subject → how often a published message arrives: 1 normally, 0 lost, 2 repeated."""


@dataclass(slots=True)
class _Listener:
    subject: str
    handler: Handler
    group: str
    permits: asyncio.Semaphore
    tasks: set[asyncio.Task[bytes | None]] = field(default_factory=set)


class FakeBus:
    """`EventBus` in one process. `connected = False` makes every call fail as a lost server does."""

    def __init__(self, deliveries: Deliveries = lambda _subject: 1) -> None:
        self.connected = True
        self.durable: dict[str, tuple[str, bytes]] = {}
        """message id → (subject, data) of every durable publish, first wins."""
        self._deliveries = deliveries
        self._listeners: list[_Listener] = []
        self._turn = itertools.count()

    async def publish(self, subject: str, data: bytes) -> None:
        """Deliver to every matching subscriber, one a group."""
        if not self.connected:
            return  # the real client buffers it; a buffer that is lost with the process is a lost message
        for _ in range(self._deliveries(subject)):
            for listener in self._receivers(subject):
                self._start(listener, Message(subject, data))

    async def request(self, subject: str, data: bytes, *, timeout_ms: int = REQUEST_TIMEOUT_MS) -> bytes:
        """Deliver to each group's one and to all others, and wait for the first answer."""
        receivers = self._receivers(subject) if self.connected and self._deliveries(subject) else []
        tasks = [self._start(receiver, Message(subject, data)) for receiver in receivers]
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                for answered in asyncio.as_completed([asyncio.shield(task) for task in tasks]):
                    answer = await answered
                    if answer is not None:
                        return answer
        except TimeoutError as error:
            raise Unavailable(f"no answer on {subject} within {timeout_ms} ms") from error
        raise Unavailable(f"no answer on {subject} within {timeout_ms} ms")

    async def publish_durable(self, subject: str, data: bytes, *, message_id: str) -> None:
        """Keep the message; a repeated id is kept once."""
        if not self.connected:
            raise Unavailable(f"the stream behind {subject} takes no message now")
        if message_id not in self.durable:
            self.durable[message_id] = (subject, data)
            await self.publish(subject, data)

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "", concurrency: int = 1) -> Subscription:
        """Register a handler; `*` and `>` match as in NATS."""
        listener = _Listener(subject, handler, group, asyncio.Semaphore(concurrency or 1))
        self._listeners.append(listener)
        return _FakeSubscription(self._listeners, listener)

    def _receivers(self, subject: str) -> list[_Listener]:
        matching = [listener for listener in self._listeners if _matches(listener.subject, subject)]
        alone = [listener for listener in matching if not listener.group]
        groups: dict[str, list[_Listener]] = {}
        for listener in matching:
            if listener.group:
                groups.setdefault(listener.group, []).append(listener)
        turn = next(self._turn)
        return alone + [members[turn % len(members)] for members in groups.values()]

    def _start(self, listener: _Listener, message: Message) -> "asyncio.Task[bytes | None]":
        task = asyncio.create_task(_handle(listener, message))
        listener.tasks.add(task)
        task.add_done_callback(listener.tasks.discard)
        return task


async def _handle(listener: _Listener, message: Message) -> bytes | None:
    async with listener.permits:
        try:
            return await listener.handler(message)
        except Exception:  # noqa: BLE001 - as the real bus: one bad message must not end the subscription
            return None


def _matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


class _FakeSubscription:
    def __init__(self, listeners: list[_Listener], listener: _Listener) -> None:
        self._listeners = listeners
        self._listener = listener

    async def stop(self) -> None:
        if self._listener in self._listeners:
            self._listeners.remove(self._listener)
        if self._listener.tasks:
            await asyncio.wait(set(self._listener.tasks), timeout=60)

"""What the nodes say, read once a message for everything in this process that follows them.

Operators' view of the nodes, streams that leave emptied nodes and versions that take over all live on it. A listener
is called in the loop, in order of the messages, and must not wait.
"""

from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.event_bus import EventBus, Message, Subscription
from roundhouse.wire.v1 import loading_pb2

log = structlog.get_logger(__name__)

Listener = Callable[[loading_pb2.NodeState], None]


class NodeStateFeed:
    """One subscription. Complete about a second after `start`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._subscription: Subscription | None = None

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every state from now on."""
        self._listeners.append(listener)

    async def start(self, bus: EventBus) -> None:
        """Follow the nodes until `stop`. Raises Unavailable."""
        self._subscription = await bus.subscribe(subjects.NODE_STATES, self._on_message)

    async def stop(self) -> None:
        """Follow no more. Idempotent."""
        if self._subscription is not None:
            await self._subscription.stop()
            self._subscription = None

    async def _on_message(self, message: Message) -> None:
        try:
            state = loading_pb2.NodeState.FromString(message.data)
        except DecodeError:
            log.warning("node_state_not_readable", subject=message.subject)
            return
        for listener in self._listeners:
            listener(state)

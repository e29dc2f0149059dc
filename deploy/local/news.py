"""What happens in a running cluster, as one line an event for the person who started it.

Sources: the audit stream (loads, evictions, admin actions) and the nodes' own states. Nothing is stored.
"""

from collections.abc import Callable
from time import strftime

from roundhouse import subjects
from roundhouse.event_bus import EventBus, Message, Subscription
from roundhouse.wire.v1 import events_pb2, loading_pb2

Tell = Callable[[str], None]


class News:
    """Follows the bus and tells. Use `start`, then `stop`."""

    def __init__(self, bus: EventBus, tell: Tell) -> None:
        self._bus = bus
        self._tell = tell
        self._accepting: dict[str, bool] = {}
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Begin to follow."""
        self._subscriptions = [
            await self._bus.subscribe(subjects.AUDIT_SUBJECTS, self._on_audit),
            await self._bus.subscribe(subjects.NODE_STATES, self._on_node_state),
        ]

    async def stop(self) -> None:
        """Stop following. Idempotent."""
        for subscription in self._subscriptions:
            await subscription.stop()
        self._subscriptions = []

    async def _on_audit(self, message: Message) -> None:
        event = events_pb2.AuditEvent.FromString(message.data)
        self._tell(audit_line(event))

    async def _on_node_state(self, message: Message) -> None:
        state = loading_pb2.NodeState.FromString(message.data)
        before = self._accepting.get(state.node_id, True)
        self._accepting[state.node_id] = state.accepting
        if before and not state.accepting:
            self._tell(f"{state.node_id} takes no work: {state.unhealthy_reason or 'draining'}")
        elif state.accepting and not before:
            self._tell(f"{state.node_id} takes work again")


def audit_line(event: events_pb2.AuditEvent) -> str:
    """One line for an audit event: `load atlas-7 on node-1 (demand, load_ms=213)`."""
    details = dict(event.details)
    node = details.pop("node", "") or details.pop("node_id", "")
    notes = [event.reason, *(f"{key}={value}" for key, value in sorted(details.items()) if key != "digest")]
    where = f" on {node}" if node else ""
    extra = ", ".join(note for note in notes if note)
    return f"{event.what} {event.subject}{where}" + (f" ({extra})" if extra else "")


def stamped(line: str) -> str:
    """The line with the local time before it."""
    return f"{strftime('%H:%M:%S')}  {line}"

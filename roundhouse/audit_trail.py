"""The audit trail on the bus (JetStream AUDIT), and in this process's log whatever the bus does."""

import uuid
from collections.abc import Mapping

import structlog

from roundhouse import subjects
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.wire.v1 import events_pb2

log = structlog.get_logger(__name__)


class BusAuditTrail:
    """Records actions. One that was done is not undone because nobody could be told (case B06)."""

    def __init__(self, bus: EventBus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def record(
        self, what: str, *, actor: str, subject: str, reason: str = "", details: Mapping[str, str] | None = None
    ) -> None:
        """Record that `actor` (a service, or the id of a key) did `what` to `subject`. Never raises for the bus.

        Takes up to the bus's time-out when it is away."""
        event = events_pb2.AuditEvent(
            time_unix_ms=self._clock.now_ms(),
            what=what,
            actor=actor,
            subject=subject,
            reason=reason,
            details=details or {},
        )
        log.info("audit", what=what, actor=actor, subject=subject, reason=reason, details=dict(details or {}))
        try:
            await self._bus.publish_durable(
                subjects.audit(what), event.SerializeToString(), message_id=uuid.uuid4().hex
            )
        except Unavailable as error:
            log.warning("audit_event_not_published", what=what, reason=error.message)

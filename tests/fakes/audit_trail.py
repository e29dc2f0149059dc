"""An audit trail that keeps its events for the test."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Recorded:
    """One event."""

    what: str
    actor: str
    subject: str
    reason: str
    details: dict[str, str]


@dataclass(slots=True)
class RecordedAudit:
    """`AuditTrail` in memory."""

    events: list[Recorded] = field(default_factory=list)

    async def record(
        self, what: str, *, actor: str, subject: str, reason: str = "", details: Mapping[str, str] | None = None
    ) -> None:
        self.events.append(Recorded(what, actor, subject, reason, dict(details or {})))

"""`UsageSink` in memory."""

from dataclasses import dataclass, field

from roundhouse.wire.v1.usage_pb2 import UsageEvent


@dataclass
class FakeUsageSink:
    """Keeps every event; `recorded` also shows repetitions, of which there should be none."""

    has_room: bool = True
    recorded: list[UsageEvent] = field(default_factory=list)

    async def record(self, event: UsageEvent) -> None:
        """See `UsageSink.record`."""
        self.recorded.append(event)

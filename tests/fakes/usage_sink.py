"""`UsageSink` in memory."""

from dataclasses import dataclass, field

from roundhouse.wire.v1.usage_pb2 import UsageEvent


@dataclass
class FakeJournal:
    """`AttemptJournal` that remembers every note."""

    started: UsageEvent
    notes: list[tuple[int, int, int]] = field(default_factory=list)

    def note(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """See `AttemptJournal.note`."""
        self.notes.append((input_tokens, cached_tokens, output_tokens))


@dataclass
class FakeUsageSink:
    """Keeps every event; `recorded` also shows repetitions, of which there should be none."""

    has_room: bool = True
    full_reason: str = ""
    recorded: list[UsageEvent] = field(default_factory=list)
    journals: list[FakeJournal] = field(default_factory=list)

    def begin(self, started: UsageEvent, pool: str) -> FakeJournal:
        """See `UsageSink.begin`."""
        self.journals.append(FakeJournal(started))
        return self.journals[-1]

    async def record(self, event: UsageEvent) -> None:
        """See `UsageSink.record`."""
        self.recorded.append(event)

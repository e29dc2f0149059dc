"""`BlockHolds` that remembers what was moved, what was to be held and what ended."""

from dataclasses import dataclass, field

from services.gateway.ports import BlockTransfer, HeldBlocks


@dataclass
class RecordedHolds:
    """In memory."""

    begun: list[tuple[str, str, HeldBlocks]] = field(default_factory=list)
    held: list[tuple[str, HeldBlocks]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # handles

    def begin(self, source: str, target: str, held: HeldBlocks) -> BlockTransfer:
        """See `BlockHolds.begin`."""
        self.begun.append((source, target, held))
        return _Recorded(self, source, held)


@dataclass
class _Recorded:
    holds: RecordedHolds
    source: str
    blocks: HeldBlocks

    def prefilled(self) -> None:
        """See `BlockTransfer.prefilled`."""
        self.holds.held.append((self.source, self.blocks))

    def end(self) -> None:
        """See `BlockTransfer.end`."""
        self.holds.ended.append(self.blocks.handle)

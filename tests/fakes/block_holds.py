"""`BlockHolds` that remembers what was to be held."""

from dataclasses import dataclass, field

from services.gateway.ports import HeldBlocks


@dataclass
class RecordedHolds:
    """In memory."""

    held: list[tuple[str, HeldBlocks]] = field(default_factory=list)

    def hold(self, address: str, held: HeldBlocks) -> None:
        """See `BlockHolds.hold`."""
        self.held.append((address, held))

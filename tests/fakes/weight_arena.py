"""The host arena in memory. Passes tests/contract/test_weight_arena.py as the real one does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.clock import Clock
from services.loader.ports import Filling, HostVersion, Lane

STEP_MS = 10


@dataclass(slots=True)
class FakeWeightArena:
    """`WeightArena` that remembers what was written where. `recorded` is what the next process would find."""

    clock: Clock
    capacity: int = 1_000
    page: int = 1
    path: Path = Path("/arena")
    fill_ms: int = 0
    recorded: list[HostVersion] = field(default_factory=list)
    filled: list[Filling] = field(default_factory=list)
    record_ms: int = 0
    recording: bool = False

    async def start(self) -> list[HostVersion]:
        """See `WeightArena.start`."""
        return list(self.recorded)

    async def fill(self, files: Sequence[Filling], lane: Lane, on_bytes: Callable[[int], None]) -> None:
        """See `WeightArena.fill`."""
        left_ms = self.fill_ms
        while left_ms > 0 or not lane.is_open:
            await self.clock.sleep_ms(STEP_MS)
            left_ms -= STEP_MS if lane.is_open else 0
        self.filled += files
        on_bytes(sum(file.size for file in files))

    async def record(self, versions: Sequence[HostVersion]) -> None:
        """See `WeightArena.record`."""
        assert not self.recording, "one call at a time"
        self.recording = True
        if self.record_ms:
            await self.clock.sleep_ms(self.record_ms)
        self.recorded, self.recording = list(versions), False

"""How fast bytes moved lately, and so how long those that still have to move will take.

One rate for each way (source to disk, disk to host, host to device), an average in which the last move counts a
quarter (a guess: a few loads are enough to follow a change, one odd load is not).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

_NEW_SHARE = 0.25


class Way(StrEnum):
    """From which tier to which."""

    TO_DISK = "source-disk"
    TO_HOST = "disk-host"
    TO_DEVICE = "host-device"


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a millisecond for each way; a way that was never used has none."""

    bytes_per_ms: Mapping[Way, float] = field(default_factory=dict)

    def learned(self, way: Way, size: int, duration_ms: int) -> "Rates":
        """With one more move: `size` bytes in `duration_ms`. A move of nothing teaches nothing."""
        if size <= 0:
            return self
        rate = size / max(1, duration_ms)
        before = self.bytes_per_ms.get(way, rate)
        return replace(self, bytes_per_ms={**self.bytes_per_ms, way: before + _NEW_SHARE * (rate - before)})

    def remaining_ms(self, way: Way, size: int) -> int | None:
        """How long `size` bytes will take; None if nothing is known of this way."""
        if size <= 0:
            return 0
        rate = self.bytes_per_ms.get(way)
        return None if rate is None else max(1, round(size / rate))

    def bytes_per_second(self, way: Way) -> int:
        """For operators and planners; 0 = not measured."""
        return round(1000 * self.bytes_per_ms.get(way, 0))


@dataclass(frozen=True, slots=True)
class Moving:
    """A move that goes on: what it had done by now, and since when."""

    done: int
    total: int
    elapsed_ms: int

    def remaining_ms(self, usual: int | None) -> int | None:
        """By its own speed once a twentieth is done, before that by `usual`, what the whole is thought to take."""
        if self.done >= self.total:
            return 0
        if self.done * 20 >= self.total and self.elapsed_ms > 0:
            return max(1, round(self.elapsed_ms * (self.total - self.done) / self.done))
        return None if usual is None else max(1, usual - self.elapsed_ms)

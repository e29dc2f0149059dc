"""Who may move bytes now: what a waiting request needs goes before what is only expected, and that before the rest.

A lower one pauses between two chunks while any higher one moves, and goes on where it was. A pre-warm that a request
joins is a demand from then on. Beside that, what no request waits for may have a rate: disk and line are then free for
others, also for those that this node knows nothing of.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum


class Priority(IntEnum):
    """Lower goes first."""

    DEMAND = 0
    PREWARM = 1
    BACKGROUND = 2

    @staticmethod
    def of_reason(reason: str) -> "Priority":
        """By the reason of an order; one that gives none is taken for a request, as callers before reasons were."""
        return _OF_REASON.get(reason, Priority.DEMAND)


_OF_REASON = {"prewarm": Priority.PREWARM, "background": Priority.BACKGROUND}


def may_move(own: Priority, all_moving: Collection[Priority]) -> bool:
    """Whether nobody of a higher priority moves."""
    return own <= min(all_moving, default=own)


def has_rate(own: Priority) -> bool:
    """Whether the rate holds for it: never for what a request waits for."""
    return own > Priority.DEMAND


@dataclass(frozen=True, slots=True)
class Pace:
    """A rate that copies share, chunk by chunk: each begins when the ones before it are through at that rate."""

    bytes_per_s: int  # 0 = no limit
    through_at_s: float = 0.0

    def take(self, size: int, now_s: float) -> "tuple[Pace, float]":
        """The pace with one more chunk, and when that may begin. Unused time is not saved up."""
        if self.bytes_per_s <= 0:
            return self, now_s
        begins_s = max(self.through_at_s, now_s)
        return replace(self, through_at_s=begins_s + size / self.bytes_per_s), begins_s

"""Who may move bytes now: what a waiting request needs goes before what is only expected, and that before the rest.

A lower one pauses between two chunks while any higher one moves, and goes on where it was. A pre-warm that a request
joins is a demand from then on.
"""

from collections.abc import Collection
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

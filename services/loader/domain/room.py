"""Which holders leave to make room: idle instances on the device.

Only a choice; nothing is unloaded or deleted here. All or nothing: when even everything offered does not make enough
room, the answer is `NotEnough` and nobody is chosen, so a hopeless load evicts nothing (case B22).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Offered(Generic[Key]):
    """Something that may leave, and the bytes it would give."""

    key: Key
    size: int


@dataclass(frozen=True, slots=True)
class Leaving(Generic[Key]):
    """Who has to leave, in this order. Empty when there is room already."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Even if all that is offered left, `missing` bytes would lack."""

    missing: int


def choose_leaving(needed: int, offered: Sequence[Offered[Key]]) -> Leaving[Key] | NotEnough:
    """Choose from `offered`, in its order, only as many as give `needed` bytes. O(offered).

    The first so many that are enough are taken; then those that turn out not to be needed are dropped again, later
    ones first, because the order says who should rather go. The result has no member that could stay."""
    chosen: list[Offered[Key]] = []
    given = 0
    for candidate in offered:
        if given >= needed:
            break
        chosen.append(candidate)
        given += candidate.size
    if given < needed:
        return NotEnough(missing=needed - given)
    for candidate in reversed(chosen):
        if given - candidate.size >= needed:
            chosen.remove(candidate)
            given -= candidate.size
    return Leaving(tuple(candidate.key for candidate in chosen))

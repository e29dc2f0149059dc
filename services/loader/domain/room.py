"""Which holders leave to make room: idle instances on the devices.

Only a choice; nothing is unloaded or deleted here. All or nothing: when even everything offered does not make enough
room, the answer is `NotEnough` and nobody is chosen, so a hopeless load evicts nothing (case B22).
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Offered(Generic[Key]):
    """Something that may leave, and the bytes it would give on each device."""

    key: Key
    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Leaving(Generic[Key]):
    """Who has to leave, in this order. Empty when there is room already."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Even if all that is offered left, `missing` bytes would lack."""

    missing: int


def choose_leaving(
    needed: Mapping[int, int], offered: Sequence[Offered[Key]], required: Collection[Key] = ()
) -> Leaving[Key] | NotEnough:
    """Choose from `offered`, in its order, only as many as give `needed` bytes on each device. O(offered × devices).

    Those `required` leave in any case; they are offered too.

    The first so many that are enough are taken, only those that give where something is missing; then those that turn
    out not to be needed are dropped again, later ones first, because the order says who should rather go. The result
    has no member that could stay."""
    missing = dict(needed)
    chosen: list[Offered[Key]] = []
    for candidate in offered:
        if candidate.key in required or any(missing.get(index, 0) > 0 for index in candidate.sizes):
            chosen.append(candidate)
            _give(missing, candidate, -1)
    lacking = sum(short for short in missing.values() if short > 0)
    if lacking:
        return NotEnough(missing=lacking)
    for candidate in [each for each in reversed(chosen) if each.key not in required]:
        _give(missing, candidate, 1)
        if any(short > 0 for short in missing.values()):
            _give(missing, candidate, -1)
        else:
            chosen.remove(candidate)
    return Leaving(tuple(candidate.key for candidate in chosen))


def _give(missing: dict[int, int], candidate: Offered[Key], sign: int) -> None:
    for index, size in candidate.sizes.items():
        if index in missing:
            missing[index] += sign * size

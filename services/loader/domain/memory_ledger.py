"""The ledger of one tier of one node: who holds how many bytes, and what is promised to whom.

Immutable: every change is a new ledger, so a step that fails keeps the old one and nothing is undone. It knows no
clock and decides no eviction; `room` does. Invariant 6: `resident + reserved ≤ capacity`, asserted at each change.

    capacity  |== resident ==|-- reserved --|.... free ....|
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one holder: promised and not yet there, and there."""

    reserved: int = 0
    resident: int = 0

    @property
    def total(self) -> int:
        """All bytes that nobody else may take."""
        return self.reserved + self.resident


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The ledger was not changed: `missing` more free bytes would be needed."""

    missing: int


@dataclass(frozen=True, slots=True)
class MemoryLedger(Generic[Key]):
    """The bytes of one tier. Each change is O(holders)."""

    capacity: int
    holdings: Mapping[Key, Holding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(held.reserved >= 0 and held.resident >= 0 for held in self.holdings.values())
        assert self.resident + self.reserved <= self.capacity, "invariant 6: more is held than there is"

    @property
    def resident(self) -> int:
        """Bytes that are there."""
        return sum(held.resident for held in self.holdings.values())

    @property
    def reserved(self) -> int:
        """Bytes that are promised."""
        return sum(held.reserved for held in self.holdings.values())

    @property
    def free(self) -> int:
        """Bytes that anyone may still reserve."""
        return self.capacity - self.resident - self.reserved

    def held_by(self, key: Key) -> Holding:
        """What one holder has; nothing if it is unknown."""
        return self.holdings.get(key, Holding())

    def reserve(self, key: Key, size: int) -> "MemoryLedger[Key] | NoRoom":
        """Promise `size` bytes to a holder that has nothing yet."""
        assert size >= 0
        assert key not in self.holdings, f"{key} holds bytes already"
        if size > self.free:
            return NoRoom(missing=size - self.free)
        return self._with(key, Holding(reserved=size))

    def reserve_up_to(self, key: Key, size: int) -> "MemoryLedger[Key]":
        """Raise a holder's promise towards `size` bytes by what is free now. Idempotent.

        This is how a load claims room that others still have to leave: it takes what is free at once, and each victim's
        bytes in the same step that releases them, so that nobody can come between."""
        held = self.held_by(key)
        assert held.resident == 0
        more = max(0, min(size - held.reserved, self.free))
        return self._with(key, replace(held, reserved=held.reserved + more))

    def commit(self, key: Key) -> "MemoryLedger[Key]":
        """The promised bytes of a holder are there now. Idempotent."""
        return self._with(key, Holding(resident=self.held_by(key).total))

    def resize(self, key: Key, size: int) -> "MemoryLedger[Key] | NoRoom":
        """Correct the resident bytes of a holder to what was measured."""
        held = self.held_by(key)
        assert size >= 0
        assert held.reserved == 0
        if size - held.resident > self.free:
            return NoRoom(missing=size - held.resident - self.free)
        return self._with(key, Holding(resident=size))

    def release(self, key: Key) -> "MemoryLedger[Key]":
        """The holder has nothing any more, neither promised nor there. Idempotent."""
        return replace(self, holdings={name: held for name, held in self.holdings.items() if name != key})

    def _with(self, key: Key, holding: Holding) -> "MemoryLedger[Key]":
        return replace(self, holdings={**self.holdings, key: holding})

"""Cuts a fixed arena into slots, so that blocks of many models can come and go for years without moving.

```
arena    | extent 0 | extent 1 | extent 2 | ...      equal extents
extent   | slot | slot | slot | slot |rest|          slots of one class; a free extent belongs to no class
```

Offsets only: the bytes are elsewhere. All blocks of one model are equally long, so a class is full of equals and an
extent wastes only its rest; a class grows by taking a free extent and shrinks when its last slot in one is given back.
Everything is counted in units of the smallest slot. Invariant 12: units free + units held = units in all.
Source: the slab allocator (Bonwick, USENIX 1994); decision: docs/decisions/0051-arena-and-eviction.md.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

CLASSES_A_DOUBLING = 8  # sizes between n and 2n units: wastes at most 1/8 of a slot
EXTENTS_WANTED = 64  # guess: enough for some tens of different block sizes in a small arena
EXTENT_BYTES_MAX = 64 * 1024 * 1024  # guess: 30 blocks of the largest models (2 MiB), so their rest stays small


class Slot(NamedTuple):
    """A held piece of the arena: `offset` in bytes, `units` of the smallest slot. A tuple, as one is made a block."""

    offset: int
    units: int


@dataclass(frozen=True, slots=True)
class NoSlot:
    """Every slot of the class is held and no extent is free."""


@dataclass(slots=True)
class _Extent:
    """`units` is the class, 0 while free."""

    units: int = 0
    free: list[int] = field(default_factory=list)
    held: dict[int, None] = field(default_factory=dict)  # offsets, in order of taking


class SlotArena:
    """Which parts of an arena are held. `arena_bytes` beyond the last whole extent stay unused."""

    def __init__(self, arena_bytes: int, slot_bytes: int, extent_bytes: int = 0) -> None:
        """`extent_bytes` 0 chooses: a power-of-two number of slots, about 64 extents, at most 64 MiB each."""
        assert 0 < slot_bytes <= arena_bytes
        self.slot_bytes = slot_bytes
        self.extent_units = max(1, (extent_bytes or _extent_bytes(arena_bytes, slot_bytes)) // slot_bytes)
        self._extent_bytes = self.extent_units * slot_bytes
        self._extents = [_Extent() for _ in range(arena_bytes // self._extent_bytes)]
        self._unused = list(range(len(self._extents) - 1, -1, -1))  # lowest first when popped
        self._open: dict[int, dict[int, None]] = {}  # class -> extents with a free slot
        self._units_held = 0
        self._held: dict[int, int] = {}  # class -> held slots
        self._slots: dict[int, int] = {}  # class -> slots of its extents

    @property
    def units_total(self) -> int:
        """Units in all extents."""
        return len(self._extents) * self.extent_units

    @property
    def units_held(self) -> int:
        """Units of the slots that are held."""
        return self._units_held

    @property
    def units_free(self) -> int:
        """Units in free extents, free slots and rests. Counted apart from `units_held`. O(extents)."""
        used = sum(len(extent.held) * extent.units for extent in self._extents)
        return self.units_total - used

    def class_of(self, length: int) -> int | NoSlot:
        """Units of the class that fits `length` bytes; NoSlot if no extent can hold it."""
        units = _round_up(-(-length // self.slot_bytes))
        return units if units <= self.extent_units else NoSlot()

    def take(self, units: int) -> Slot | NoSlot:
        """Hold one slot of a class. O(1), O(slots of an extent) when the class takes a new extent."""
        extents = self._open.setdefault(units, {})
        if not extents:
            if not self._unused:
                return NoSlot()
            self._assign(self._unused.pop(), units)
        index = next(iter(extents))
        extent = self._extents[index]
        offset = extent.free.pop()
        extent.held[offset] = None
        if not extent.free:
            del extents[index]
        self._units_held += units
        self._held[units] = self._held.get(units, 0) + 1
        return Slot(offset, units)

    def give_back(self, slot: Slot) -> None:
        """Free a held slot, once. An extent without held slots is free for every class."""
        index = self.extent_of(slot)
        extent = self._extents[index]
        assert extent.units == slot.units
        del extent.held[slot.offset]
        extent.free.append(slot.offset)
        self._open[slot.units][index] = None
        self._units_held -= slot.units
        self._held[slot.units] -= 1
        if not extent.held:
            self._slots[slot.units] -= self.extent_units // slot.units
            del self._open[slot.units][index]
            self._extents[index] = _Extent()
            self._unused.append(index)

    @property
    def classes(self) -> list[int]:
        """Classes that hold slots now."""
        return [units for units, held in self._held.items() if held]

    def slots_held(self, units: int) -> int:
        """Held slots of a class."""
        return self._held.get(units, 0)

    def slots_free(self, units: int) -> int:
        """Slots that a class could take now, also in free extents. O(1)."""
        slots = self._slots.get(units, 0) - self._held.get(units, 0)
        return slots + len(self._unused) * (self.extent_units // units)

    def extent_of(self, slot: Slot) -> int:
        """Index of the extent a slot lies in."""
        return slot.offset // self._extent_bytes

    def held_in(self, extent: int) -> tuple[int, ...]:
        """Offsets of the held slots of an extent."""
        return tuple(self._extents[extent].held)

    @property
    def extents(self) -> range:
        """Indices of all extents."""
        return range(len(self._extents))

    def _assign(self, index: int, units: int) -> None:
        start, size = index * self._extent_bytes, units * self.slot_bytes
        slots = self.extent_units // units
        offsets = [start + place * size for place in range(slots - 1, -1, -1)]
        self._extents[index] = _Extent(units, offsets)
        self._slots[units] = self._slots.get(units, 0) + slots
        self._open[units][index] = None


def _extent_bytes(arena_bytes: int, slot_bytes: int) -> int:
    units = max(1, min(arena_bytes // EXTENTS_WANTED, EXTENT_BYTES_MAX) // slot_bytes)
    return int(slot_bytes << (units.bit_length() - 1))


def _round_up(units: int) -> int:
    """The next size with at most `CLASSES_A_DOUBLING` sizes between a power of two and the next."""
    step = max(1, (1 << (units.bit_length() - 1)) // CLASSES_A_DOUBLING)
    return -(-units // step) * step

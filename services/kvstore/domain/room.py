"""Chooses what goes when an arena has no slot of a class left, or few; the table does it.

A class should have some room before it is asked for, so that no writer waits for evictions: below `LOW_SHARE` of what
it holds its worst blocks go until there is `HIGH_SHARE`.

A class takes the place of its own block least worth keeping, or a whole extent of another class if all of it is worth
less than that. Decision: docs/decisions/0051-arena-and-eviction.md and 0141.
"""

from collections.abc import Iterator, Mapping

from services.kvstore.domain.eviction import Rank, ReuseOrder
from services.kvstore.domain.records import Block
from services.kvstore.domain.reuse_forecast import ReuseForecast
from services.kvstore.domain.salt_book import SaltBook
from services.kvstore.domain.slot_arena import SlotArena

GUARANTEED_SHARE = 0.5  # of the arena is divided among the salts in it; a loud tenant can flush the other half only
LOW_SHARE, HIGH_SHARE = 1 / 128, 1 / 64  # guess: a long prompt of a large arena; costs as much of what could be kept


class Room:
    """Who goes first in one arena. `by_offset` is the table's own map of what lies where."""

    def __init__(
        self, arena: SlotArena, salts: SaltBook, by_offset: Mapping[int, Block], forecast: ReuseForecast
    ) -> None:
        """Nothing may go yet."""
        self.order = ReuseOrder(self._is_guarded, forecast)
        self._arena = arena
        self._salts = salts
        self._by_offset = by_offset
        self._crowded: set[int] = set()  # classes that have been below the low mark and not yet at the high one

    def overdue(self, blocks_max: int, now_ms: int) -> Iterator[list[Block]]:
        """What to drop, one after the other, so that every class has the room it should; about `blocks_max` blocks.

        The caller drops what is given before it asks for more."""
        self._crowded |= {units for units in self._arena.classes if self._slots_wanted(units, LOW_SHARE) > 0}
        for units in tuple(self._crowded):
            while self._slots_wanted(units, HIGH_SHARE) > 0 and (victims := self.victims(units, now_ms)):
                yield victims
                blocks_max -= len(victims)
                if blocks_max <= 0:
                    return
            self._crowded.discard(units)

    def _slots_wanted(self, units: int, share: float) -> int:
        """How many slots of a class are missing to a share of what it holds."""
        return int(share * self._arena.slots_held(units)) - self._arena.slots_free(units)

    def victims(self, units: int, now_ms: int) -> list[Block]:
        """What to drop for a slot of a class: the least worth of it, or an extent worth less; empty if nothing may."""
        own, least = self.order.least(units, now_ms), self.order.least_of_all(now_ms)
        if least is None:
            return []
        if own is not least:
            extent = self._arena.extent_of(least.slot)
            greatest = self.order.greatest_rank(self._blocks_in(extent), now_ms)
            if greatest is not None and (own is None or greatest < self.order.rank(own, now_ms)):
                return self._blocks_in(extent)
        return [own] if own is not None else self._any_extent(now_ms)

    def _any_extent(self, now_ms: int) -> list[Block]:
        """The extent least worth keeping. O(blocks); only for a class that has nothing to give."""
        candidates: list[tuple[Rank, int]] = []
        for extent in self._arena.extents:
            greatest = self.order.greatest_rank(self._blocks_in(extent), now_ms, guarded=True)
            if greatest is not None:
                candidates.append((greatest, extent))
        return self._blocks_in(min(candidates)[1]) if candidates else []

    def _is_guarded(self, salt: bytes) -> bool:
        """Whether a salt holds no more than its share: half of the arena, divided equally among those in it."""
        salts = len(self._salts)
        return salts > 1 and self._salts.units(salt) <= GUARANTEED_SHARE * self._arena.units_total / salts

    def _blocks_in(self, extent: int) -> list[Block]:
        return [self._by_offset[offset] for offset in self._arena.held_in(extent)]

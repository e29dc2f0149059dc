"""Chooses what goes when an arena has no slot of a class left; the table does it.

A class takes the place of its own block least worth keeping, or a whole extent of another class if all of it is worth
less than that. Decision: docs/decisions/0051-arena-and-eviction.md.
"""

from collections.abc import Mapping

from services.kvstore.domain.eviction import Rank, ReuseOrder, rank
from services.kvstore.domain.records import Block
from services.kvstore.domain.salt_book import SaltBook
from services.kvstore.domain.slot_arena import SlotArena

GUARANTEED_SHARE = 0.5  # of the arena is divided among the salts in it; a loud tenant can flush the other half only


class Room:
    """Who goes first in one arena. `by_offset` is the table's own map of what lies where."""

    def __init__(self, arena: SlotArena, salts: SaltBook, by_offset: Mapping[int, Block]) -> None:
        """Nothing may go yet."""
        self.order = ReuseOrder(self._is_guarded)
        self._arena = arena
        self._salts = salts
        self._by_offset = by_offset

    def victims(self, units: int) -> list[Block]:
        """What to drop for a slot of a class: the least worth of it, or an extent worth less; empty if nothing may."""
        own, least = self.order.least(units), self.order.least_of_all()
        if least is None:
            return []
        if own is not least:
            extent = self._arena.extent_of(least.slot)
            greatest = self.order.greatest_rank(self._blocks_in(extent))
            if greatest is not None and (own is None or greatest < rank(own)):
                return self._blocks_in(extent)
        return [own] if own is not None else self._any_extent()

    def _any_extent(self) -> list[Block]:
        """The extent least worth keeping. O(blocks); only for a class that has nothing to give."""
        candidates: list[tuple[Rank, int]] = []
        for extent in self._arena.extents:
            greatest = self.order.greatest_rank(self._blocks_in(extent), guarded=True)
            if greatest is not None:
                candidates.append((greatest, extent))
        return self._blocks_in(min(candidates)[1]) if candidates else []

    def _is_guarded(self, salt: bytes) -> bool:
        """Whether a salt holds no more than its share: half of the arena, divided equally among those in it."""
        salts = len(self._salts)
        return salts > 1 and self._salts.units(salt) <= GUARANTEED_SHARE * self._arena.units_total / salts

    def _blocks_in(self, extent: int) -> list[Block]:
        return [self._by_offset[offset] for offset in self._arena.held_in(extent)]

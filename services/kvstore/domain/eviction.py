"""Which block goes when room is needed: the one least worth keeping of those nobody holds, children before parents.

Worth is a time: the last use, plus a part of the arena's lifetime (how long blocks that went had been unused) for each
further use, less a part of it for each doubling of the distance from the start of the prompt. So a block that was used
often outlives a scan by a lifetime, however fast the arena turns over, and shared beginnings of prompts outlive
their ends. All blocks of a class are equally long, so worth a byte orders as worth does; between classes `BlockTable`
compares the worth of whole extents.

A parent is used whenever its child is, at least as often, and enters after it, so it is worth more at the same time; if
the lifetime shrank in between, the table still drops what is below first. Guarded blocks, of a salt that has no more
than its share, go only if there is nothing else. Decisions: docs/decisions/0051-arena-and-eviction.md and 0055.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator

from services.kvstore.domain.records import Block

USE_BONUS = 0.5  # of a lifetime a use; chosen among 0.1, 0.5 and 1 on the traces of the benchmark
POSITION_DISCOUNT = 0.1  # of a lifetime a doubling of the depth; more helps small arenas and harms middling ones
USES_MAX = 2  # more keeps sessions that have ended: at 8 the coding trace falls 4 % below LRU at 3,000 blocks
LIFETIME_WEIGHT = 0.01  # of one eviction in the moving average: about the last hundred
STALE_FACTOR = 2  # a heap is built anew when it is mostly entries of blocks that have been used or dropped since

Rank = tuple[float, int]
_Entry = tuple[float, int, Block]


def rank(block: Block) -> Rank:
    """What blocks are compared by: worth, and among equals the order of their last uses."""
    return block.worth, block.tick


class ReuseOrder:
    """Blocks that may be evicted, least worth first, for each slot class and salt. Times in ms."""

    def __init__(self, is_guarded: Callable[[bytes], bool]) -> None:
        """`is_guarded` says whether a salt holds no more than its share now."""
        self._is_guarded = is_guarded
        self._heaps: dict[int, dict[bytes, list[_Entry]]] = {}
        self._members: dict[int, dict[bytes, int]] = {}
        self._present: dict[bytes, Block] = {}
        self._tick = 0
        self._lifetime_ms = 0.0

    def add(self, block: Block, now_ms: int) -> None:
        """Enter a block whose last lease ended now. It must not be there. O(log blocks)."""
        assert block.key not in self._present
        self._tick += 1
        lifetimes = USE_BONUS * min(block.uses, USES_MAX) - POSITION_DISCOUNT * math.log2(1 + block.depth)
        block.used_ms, block.worth, block.tick = now_ms, now_ms + lifetimes * self._lifetime_ms, self._tick
        self._present[block.key] = block
        heap = self._heaps.setdefault(block.slot.units, {}).setdefault(block.salt, [])
        heapq.heappush(heap, (block.worth, block.tick, block))
        members = self._members.setdefault(block.slot.units, {})
        members[block.salt] = members.get(block.salt, 0) + 1
        if len(heap) > STALE_FACTOR * members[block.salt] + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def discard(self, block: Block) -> None:
        """Take a block out, if it is there."""
        if self._present.get(block.key) is not block:
            return
        del self._present[block.key]
        members = self._members[block.slot.units]
        members[block.salt] -= 1
        if not members[block.salt]:
            del members[block.salt], self._heaps[block.slot.units][block.salt]

    def evicted(self, block: Block, now_ms: int) -> None:
        """Learn from a block that goes to make room."""
        self._lifetime_ms += LIFETIME_WEIGHT * (now_ms - block.used_ms - self._lifetime_ms)

    def __contains__(self, block: Block) -> bool:
        return self._present.get(block.key) is block

    def least(self, units: int) -> Block | None:
        """The block of a class least worth keeping, guarded ones last. O(salts)."""
        return self._least(self._heads(units))

    def least_of_all(self) -> Block | None:
        """The block of any class least worth keeping, guarded ones last. O(classes x salts)."""
        return self._least(head for units in self._heaps for head in self._heads(units))

    def greatest_rank(self, blocks: Iterable[Block], *, guarded: bool = False) -> Rank | None:
        """The greatest rank among `blocks`; None if one may not be evicted (guarded ones may if `guarded`)."""
        greatest: Rank | None = None
        for block in blocks:
            if block not in self or (not guarded and self._is_guarded(block.salt)):
                return None
            greatest = rank(block) if greatest is None else max(greatest, rank(block))
        return greatest

    def _least(self, heads: Iterable[_Entry]) -> Block | None:
        ranked = [(self._is_guarded(entry[2].salt), entry[0], entry[1], entry[2].key) for entry in heads]
        return self._present[min(ranked)[3]] if ranked else None

    def _heads(self, units: int) -> Iterator[_Entry]:
        for heap in self._heaps.get(units, {}).values():
            while not self._is_current(heap[0]):
                heapq.heappop(heap)
            yield heap[0]

    def _is_current(self, entry: _Entry) -> bool:
        block = entry[2]
        return self._present.get(block.key) is block and block.tick == entry[1]

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

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator

from services.kvstore.domain.records import Block

USE_BONUS = 0.5  # of a lifetime a use; chosen among 0.1, 0.5 and 1 on the traces of the benchmark
POSITION_DISCOUNT = 0.1  # of a lifetime a doubling of the depth; more helps small arenas and harms middling ones
USES_MAX = 2  # more keeps sessions that have ended: at 8 the coding trace falls 4 % below LRU at 3,000 blocks
LIFETIME_WEIGHT = 0.01  # of one eviction in the moving average: about the last hundred
STALE_FACTOR = 2  # a heap is built anew when it is mostly entries of blocks that have been dropped since

Rank = tuple[float, int]
_Entry = tuple[float, int, Block]


def rank(block: Block) -> Rank:
    """What blocks are compared by: worth, and among equals the order of their last uses."""
    return block.worth, block.tick


class ReuseOrder:
    """Blocks that may be evicted, least worth first, for each slot class and salt. Times in ms.

    A block that was used keeps its place in the heap until it comes to the head, and only then goes where it belongs: a
    use costs O(1), and many uses cost one move. Its worth never falls by a use, so no other block is passed over.
    """

    def __init__(self, is_guarded: Callable[[bytes], bool]) -> None:
        """`is_guarded` says whether a salt holds no more than its share now."""
        self._is_guarded = is_guarded
        self._heaps: dict[int, dict[bytes, _Heap]] = {}
        self._tick = 0
        self._lifetime_ms = 0.0

    def add(self, block: Block, now_ms: int) -> None:
        """Enter a block whose last lease ended now. It must not be there. O(1); O(log blocks) for a new one."""
        assert not block.listed
        self._tick += 1
        lifetimes = USE_BONUS * min(block.uses, USES_MAX) - _position_discount(block.depth)
        block.used_ms, block.worth, block.tick = now_ms, now_ms + lifetimes * self._lifetime_ms, self._tick
        block.listed = True
        if not block.queued:
            heaps = self._heaps.setdefault(block.slot.units, {})
            heap = heaps.get(block.salt)
            if heap is None:
                heap = heaps[block.salt] = _Heap()
            heap.push(block)

    def discard(self, block: Block) -> None:
        """Take a block out, if it is there: somebody holds it."""
        block.listed = False

    def dropped(self, block: Block) -> None:
        """A block has left the table."""
        block.listed = False
        if block.queued:
            heaps = self._heaps[block.slot.units]
            heap = heaps[block.salt]
            heap.forget()
            if not heap.alive:
                del heaps[block.salt]

    def evicted(self, block: Block, now_ms: int) -> None:
        """Learn from a block that goes to make room."""
        self._lifetime_ms += LIFETIME_WEIGHT * (now_ms - block.used_ms - self._lifetime_ms)

    def __contains__(self, block: Block) -> bool:
        return block.listed

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

    def _least(self, heads: Iterable[Block]) -> Block | None:
        return min(heads, key=lambda block: (self._is_guarded(block.salt), block.worth, block.tick), default=None)

    def _heads(self, units: int) -> Iterator[Block]:
        for heap in self._heaps.get(units, {}).values():
            head = heap.head()
            if head is not None:
                yield head


class _Heap:
    """Blocks of one class and salt. Each is in it at most once, as `queued` says, with a worth it had once."""

    def __init__(self) -> None:
        self.alive = 0  # entries whose block is in the table
        self._entries: list[_Entry] = []

    def push(self, block: Block) -> None:
        """Enter a block that is not in it."""
        block.queued = True
        self.alive += 1
        heapq.heappush(self._entries, (block.worth, block.tick, block))

    def head(self) -> Block | None:
        """The block least worth that may be evicted."""
        entries = self._entries
        while entries:
            _, tick, block = entries[0]
            if block.listed and tick == block.tick:
                return block
            if block.listed:
                heapq.heapreplace(entries, (block.worth, block.tick, block))
                continue
            heapq.heappop(entries)  # gone, or held: then it enters again when it is let go
            if not block.condemned:
                block.queued = False
                self.alive -= 1
        return None

    def forget(self) -> None:
        """A block of it has left the table; its entry goes when it comes to the head, or when most are like it."""
        self.alive -= 1
        if len(self._entries) > STALE_FACTOR * self.alive + 64:
            self._entries = [entry for entry in self._entries if not entry[2].condemned]
            heapq.heapify(self._entries)


@functools.cache
def _position_discount(depth: int) -> float:
    return POSITION_DISCOUNT * math.log2(1 + depth)

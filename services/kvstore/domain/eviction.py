"""Which block goes when room is needed: the one least worth keeping of those that nobody holds and nothing hangs on.

What a block is worth is its density: how many uses keeping it is expected to bring for its time (`reuse_forecast`). It
changes while the block lies there, so no order by it lasts; but blocks of one kind differ by age only, and the density
rises to the expected next use and falls afterwards: the least of a kind is its oldest or its youngest. So each kind
keeps its blocks by age, and only ends are compared. A scan is the youngest of its kind: it goes before what has waited
for long.

Only ends of chains are here, so a parent never goes before its children; it is listed when the last of them has gone.
Guarded blocks, of a salt that has no more than its share, go only if there is nothing else. All blocks of a class are
equally long, so worth a byte orders as worth does; between classes `Room` compares whole extents. Without experience
all are worth the same, and the longest unused goes. What was used just now goes after all others, longest unused
first: the rest of its chain is still being written, fetched or read from disk. Decisions:
docs/decisions/0051-arena-and-eviction.md and 0141.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.kvstore.domain.records import Block
from services.kvstore.domain.reuse_forecast import ReuseForecast

STALE_FACTOR = 2  # a heap is built anew when it is mostly entries of blocks that are not listed so any more
FRESH_MS = 500  # guess: the next chunk of a prompt is reserved within that, on a busy machine too
FRESH_SEEN_MAX = 64  # of them looked through for one of a salt that is not guarded
BATCH = 16  # evictions of one choice: what other kinds have is compared anew after so many

Rank = tuple[float, int, int]
Worth = tuple[bool, float, int, int]
_ANY: Worth = (True, math.inf, 0, 0)
_FRESH = -1  # the kind a block is listed under while it is fresh
_Entry = tuple[int, int, int, Block]


class ReuseOrder:
    """Ends of chains that may be evicted, for each slot class. Times in ms."""

    def __init__(self, is_guarded: Callable[[bytes], bool], forecast: ReuseForecast) -> None:
        """`is_guarded` says whether a salt holds no more than its share now."""
        self._is_guarded, self._forecast = is_guarded, forecast
        self._classes: dict[int, dict[tuple[bytes, int], _Leaves]] = {}
        self._choices: dict[int, _Choice] = {}
        self._fresh: dict[int, deque[tuple[int, Block]]] = {}
        self._tick = 0

    def add(self, block: Block, now_ms: int, *, uncovered: bool = False) -> None:
        """Enter the end of a chain that nobody holds any more. It must not be there. O(log blocks).

        `uncovered`: what hung on it has just been dropped, so it comes next."""
        assert not block.listed
        self._tick += 1
        block.listed, block.tick = True, self._tick
        if now_ms - block.used_ms < FRESH_MS:
            block.listed_kind = _FRESH
            fresh = self._fresh.setdefault(block.slot.units, deque())
            (fresh.appendleft if uncovered else fresh.append)((block.tick, block))
            self._settle(block.slot.units, now_ms, 2)  # so that they do not pile up when nothing is ever evicted
        else:
            self._list(block)

    def _settle(self, units: int, now_ms: int, count: int) -> None:
        """Of the fresh blocks, list up to `count` that are so no more."""
        fresh = self._fresh.get(units, ())
        while fresh and count:
            tick, block = fresh[0]
            is_there = block.listed and block.tick == tick
            if is_there and now_ms - block.used_ms < FRESH_MS:
                return
            fresh.popleft()
            count -= 1
            if is_there:
                self._list(block)

    def _list(self, block: Block) -> None:
        groups = self._classes.setdefault(block.slot.units, {})
        group = (block.salt, block.kind)
        leaves = groups.get(group)
        if leaves is None:
            leaves = groups[group] = _Leaves()
        block.listed_kind = block.kind
        leaves.add(block)

    def discard(self, block: Block) -> None:
        """Take a block out, if it is there: somebody holds it, or it has gone."""
        if not block.listed:
            return
        block.listed = False
        if block.listed_kind == _FRESH:
            return
        groups = self._classes[block.slot.units]
        group = (block.salt, block.listed_kind)
        groups[group].forget()
        if not groups[group].alive:
            del groups[group]

    def least(self, units: int, now_ms: int) -> Block | None:
        """The block of a class least worth keeping, guarded ones last. O(salts x kinds) for every `BATCH`."""
        choice = self._choices.get(units)
        if choice is not None and choice.now_ms == now_ms and choice.left:
            block = choice.leaves.end(choice.oldest)
            if block is not None and self._worth(block, now_ms) <= choice.limit:
                choice.left -= 1
                return block
        return self._choose(units, now_ms)

    def least_of_all(self, now_ms: int) -> Block | None:
        """The block of any class least worth keeping, guarded ones last."""
        classes = self._classes.keys() | self._fresh.keys()
        found = [block for units in classes if (block := self.least(units, now_ms)) is not None]
        return min(found, key=lambda block: self._worth(block, now_ms), default=None)

    def rank(self, block: Block, now_ms: int) -> Rank:
        """What blocks are compared by: density, and among equals the last use and the order of being let go."""
        return self._forecast.density(block.kind, now_ms - block.used_ms), block.used_ms, block.tick

    def greatest_rank(self, blocks: Iterable[Block], now_ms: int, *, guarded: bool = False) -> Rank | None:
        """The greatest rank among `blocks`; None if one may not be evicted (guarded ones may if `guarded`)."""
        greatest: Rank | None = None
        for block in blocks:
            if block.pins or (not guarded and self._is_guarded(block.salt)):
                return None
            rank = self.rank(block, now_ms)
            greatest = rank if greatest is None else max(greatest, rank)
        return greatest

    def _worth(self, block: Block, now_ms: int) -> Worth:
        density, used_ms, _ = self.rank(block, now_ms)
        return self._is_guarded(block.salt), density, used_ms, -block.depth

    def _choose(self, units: int, now_ms: int) -> Block | None:
        self._settle(units, now_ms, len(self._fresh.get(units, ())))
        best: tuple[Worth, int, _Leaves, bool, Block] | None = None
        second: Worth | None = None
        for worth, tick, leaves, oldest, block in self._ends(units, now_ms):
            if best is None or (worth, tick) < best[:2]:
                second = best[0] if best is not None and best[2] is not leaves else second
                best = worth, tick, leaves, oldest, block
            elif leaves is not best[2] and (second is None or worth < second):
                second = worth
        if best is None or best[0][0]:
            fresh = self._freshest_last(units)
            if fresh is not None and (best is None or not self._is_guarded(fresh.salt)):
                return fresh
        if best is None:
            return None
        self._choices[units] = _Choice(best[2], best[3], second or _ANY, now_ms, BATCH - 1)
        return best[4]

    def _freshest_last(self, units: int) -> Block | None:
        """Of the fresh blocks the longest unused, of a salt that is not guarded if there is one near."""
        there = (block for tick, block in self._fresh.get(units, ()) if block.listed and block.tick == tick)
        seen = list(itertools.islice(there, FRESH_SEEN_MAX))
        return min(seen, key=lambda block: self._is_guarded(block.salt), default=None)

    def _ends(self, units: int, now_ms: int) -> "Iterator[tuple[Worth, int, _Leaves, bool, Block]]":
        for leaves in self._classes.get(units, {}).values():
            for oldest in (True, False):
                block = leaves.end(oldest)
                if block is not None:
                    yield self._worth(block, now_ms), block.tick, leaves, oldest, block


@dataclass(slots=True)
class _Choice:
    """From which end of which list blocks are taken, while they are worth no more than `limit`."""

    leaves: "_Leaves"
    oldest: bool
    limit: Worth
    now_ms: int
    left: int


class _Leaves:
    """Blocks of one class, salt and kind by their last use, deeper ones first; entries of others linger a while."""

    def __init__(self) -> None:
        self.alive = 0
        self._oldest: list[_Entry] = []
        self._youngest: list[_Entry] = []

    def add(self, block: Block) -> None:
        """Enter a block that has just been listed."""
        self.alive += 1
        heapq.heappush(self._oldest, (block.used_ms, -block.depth, block.tick, block))
        heapq.heappush(self._youngest, (-block.used_ms, -block.depth, block.tick, block))

    def end(self, oldest: bool) -> Block | None:
        """The block at an end."""
        entries = self._oldest if oldest else self._youngest
        while entries and not _is_listed(entries[0]):
            heapq.heappop(entries)
        return entries[0][3] if entries else None

    def forget(self) -> None:
        """A block of it is no longer listed; its entries go when they come to an end, or when most are like them."""
        self.alive -= 1
        if len(self._oldest) + len(self._youngest) > 2 * STALE_FACTOR * self.alive + 128:
            for entries in (self._oldest, self._youngest):
                entries[:] = filter(_is_listed, entries)
                heapq.heapify(entries)


def _is_listed(entry: _Entry) -> bool:
    return entry[3].listed and entry[3].tick == entry[2]

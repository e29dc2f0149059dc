"""Which block goes when room is needed: the least recently used of those nobody holds, children before parents.

One order of use for each slot class. A block enters at the young end when its last lease ends, always after its
children, so the oldest entry never has a child that is still there. Cross-class rule: a class takes over an extent of
another only if everything in it is older than the class's own oldest block, or if the class has nothing to give.
Decision: docs/decisions/0051-arena-and-eviction.md.
"""

from collections.abc import Iterable

from services.kvstore.domain.records import Block


class UseOrder:
    """Blocks that may be evicted, oldest first, for each slot class."""

    def __init__(self) -> None:
        """Nothing may be evicted."""
        self._classes: dict[int, dict[bytes, Block]] = {}
        self._tick = 0

    def add(self, block: Block) -> None:
        """Enter a block as the most recently used. It must not be there."""
        order = self._classes.setdefault(block.slot.units, {})
        assert block.key not in order
        self._tick += 1
        block.used = self._tick
        order[block.key] = block

    def discard(self, block: Block) -> None:
        """Take a block out, if it is there."""
        order = self._classes.get(block.slot.units, {})
        if order.get(block.key) is block:
            del order[block.key]

    def __contains__(self, block: Block) -> bool:
        return self._classes.get(block.slot.units, {}).get(block.key) is block

    def oldest(self, units: int) -> Block | None:
        """The least recently used block of a class."""
        return next(iter(self._classes.get(units, {}).values()), None)

    def oldest_of_all(self) -> Block | None:
        """The least recently used block of any class. O(classes)."""
        heads = (next(iter(order.values())) for order in self._classes.values() if order)
        return min(heads, key=lambda block: block.used, default=None)

    def newest_use(self, blocks: Iterable[Block]) -> int | None:
        """The most recent use among `blocks`; None if one of them may not be evicted. 0 if there are none."""
        newest = 0
        for block in blocks:
            if block not in self:
                return None
            newest = max(newest, block.used)
        return newest

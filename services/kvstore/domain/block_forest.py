"""Which KV blocks an arena holds, and which stands under which: a tree of prefixes for every salt.

A block is in the forest from its reservation until it is dropped; its slot may be held longer, by leases on a condemned
block, and is on the map of slots until `vacate`. Invariant 11: a run is found only with the salt that stored it. A
block never goes before those under it. Not here: leases, pins, what goes first (`block_table`). Not thread-safe.
"""

from collections.abc import Iterable, Iterator

from services.kvstore.domain.records import ROOT, Block, NewBlocks, RefusalReason, Shared
from services.kvstore.domain.salt_book import SaltBook


class BlockForest:
    """All blocks of one arena by key, by parent, by salt and by offset."""

    def __init__(self) -> None:
        """Empty."""
        self.salts = SaltBook()
        self.by_offset: dict[int, Block] = {}  # condemned blocks too
        self._blocks: dict[bytes, Block] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}

    def find(self, key: bytes) -> Block | None:
        """A block that is stored or being written; None if it is not here."""
        return self._blocks.get(key)

    def run(self, salt: bytes, keys: Iterable[bytes], shared: Shared) -> Iterator[Block]:
        """The leading `keys`, a chain from the first block of a prompt, that are stored for these salts."""
        parent = ROOT
        for index, key in enumerate(keys):
            block = self._blocks.get(key)
            # Invariant 11: the salt is compared, though the key was made with it.
            if block is None or not block.stored or block.parent_key != parent:
                return
            if block.salt != (shared.salt if index < shared.blocks else salt):
                return
            yield block
            parent = key

    def above(self, block: Block) -> list[Block]:
        """The blocks that a block stands under, root first. O(depth)."""
        found: list[Block] = []
        while (parent := self._blocks.get((found[-1] if found else block).parent_key)) is not None:
            found.append(parent)
        return found[::-1]

    def parents(self, new: NewBlocks) -> list[Block] | RefusalReason:
        """The blocks above `new`, root first, or why `new` cannot stand under them. O(depth)."""
        found: list[Block] = []
        key = new.parent_key
        while key != ROOT:
            block = self._blocks.get(key)
            if block is None or block.salt not in (new.salt, new.parent_salt):
                return RefusalReason.PARENT_UNKNOWN
            if block.length != new.length:
                return RefusalReason.LENGTH_DIFFERS
            found.append(block)
            key = block.parent_key
        return found[::-1]

    def has_children(self, block: Block) -> bool:
        """Whether anything stands under it."""
        return block.key in self._children

    def subtree(self, block: Block) -> list[Block]:
        """A block and everything under it, parents before children. O(blocks of it)."""
        found = [block]
        for member in found:  # grows while it runs
            found += [self._blocks[key] for key in self._children.get(member.key, ())]
        return found

    def stored_keys(self) -> list[bytes]:
        """Every visible block. O(blocks)."""
        return [block.key for block in self._blocks.values() if block.stored]

    def blocks_of(self, salt: bytes) -> list[Block]:
        """Those of a salt, also ones being written, in order of coming."""
        return [self._blocks[key] for key in self.salts.keys(salt)]

    def held_for(self, salt: bytes) -> list[Block]:
        """Whatever of a salt holds a slot, or is to, condemned blocks too. O(blocks)."""
        return [block for block in self.by_offset.values() if block.salt == salt]

    def enter(self, block: Block) -> None:
        """A block has come; its key is not here."""
        self._blocks[block.key] = block
        self.by_offset[block.slot.offset] = block
        self.salts.add(block)
        self._children.setdefault(block.parent_key, {})[block.key] = None

    def remove(self, block: Block) -> None:
        """A block without children is found no more; its slot stays on the map."""
        assert block.key not in self._children, "a parent never goes before its children"
        del self._blocks[block.key]
        siblings = self._children[block.parent_key]
        del siblings[block.key]
        if not siblings:
            del self._children[block.parent_key]
        self.salts.remove(block)

    def vacate(self, block: Block) -> None:
        """Its slot holds it no more."""
        del self.by_offset[block.slot.offset]

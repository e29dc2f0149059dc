"""Which prefix blocks each node's kvstore has, as far as this replica has heard. Pure; one index a process.

Kept from numbered announcements: a gap in the numbers, or a new kvstore process, makes the node's part untrusted until
a full list has come. A wrong entry costs a detour, never a wrong answer: the engine asks its kvstore for every block.
Memory is bounded: keys are cut to 64 bits, and the node that holds most of them forgets its oldest (a prefix that is
forgotten here only counts as uncached).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from roundhouse.vocabulary import NodeId

KEYS_MOST = 2_000_000  # of all nodes, about 100 bytes each in CPython: 200 MB; at 16 tokens a block 32 million tokens
WAITING_MOST = 256  # announcements kept while a full list is on its way; more = ask for a newer list
_KEY_BYTES = 8  # of 32: two of 2 million blocks share these with a chance of 1e-7


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """One announcement of a kvstore. Without keys it only says which one was the last."""

    node_id: NodeId
    incarnation: str
    sequence: int
    stored: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()


class Heard(Enum):
    """What an announcement did."""

    APPLIED = "applied"
    OLD = "old"  # known already
    GAP = "gap"  # ask the kvstore for all it has


@dataclass(slots=True)
class _NodeBlocks:
    incarnation: str = ""
    sequence: int = 0
    keys: dict[int, None] = field(default_factory=dict)  # in the order heard
    complete: bool = True  # no announcement is missing
    waiting: list[BlockChanges] = field(default_factory=list)


@dataclass(slots=True)
class PrefixIndex:
    """The blocks of all nodes. Mutable."""

    keys_most: int = KEYS_MOST
    nodes: dict[NodeId, _NodeBlocks] = field(default_factory=dict)
    held: int = 0

    def observe(self, changes: BlockChanges) -> Heard:
        """Take an announcement in. `GAP` again and again until `replace` has come."""
        node = self.nodes.setdefault(changes.node_id, _NodeBlocks())
        if changes.incarnation != node.incarnation:
            self._clear(node)
            node.incarnation, node.sequence, node.complete = changes.incarnation, 0, True
        if changes.sequence <= node.sequence:
            return Heard.OLD if node.complete else Heard.GAP
        says_nothing = not changes.stored and not changes.dropped
        if says_nothing or not node.complete or changes.sequence != node.sequence + 1:
            node.complete = False
            node.waiting = [*node.waiting[-WAITING_MOST + 1 :], changes]
            return Heard.GAP
        self._apply(node, changes)
        return Heard.APPLIED

    def replace(self, node_id: NodeId, incarnation: str, sequence: int, keys: Iterable[bytes]) -> Heard:
        """Take a full list in, as of `sequence`; `GAP` if announcements since then are missing."""
        node = self.nodes.setdefault(node_id, _NodeBlocks())
        waiting = [each for each in node.waiting if each.incarnation == incarnation and each.sequence > sequence]
        last = max((each.sequence for each in waiting), default=sequence)
        self._clear(node)
        node.incarnation, node.sequence, node.complete = incarnation, sequence, True
        self._apply(node, BlockChanges(node_id, incarnation, sequence, tuple(keys)))
        for changes in sorted(waiting, key=lambda each: each.sequence):
            self.observe(changes)
        return Heard.APPLIED if node.complete and node.sequence == last else Heard.GAP

    def forget(self, node_id: NodeId) -> None:
        """Drop a node that has gone. Idempotent."""
        node = self.nodes.pop(node_id, None)
        if node is not None:
            self._clear(node)

    def cached_blocks(self, node_id: NodeId, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the node has. O(result)."""
        node = self.nodes.get(node_id)
        if node is None or not node.keys:
            return 0
        for count, key in enumerate(keys):
            if _cut(key) not in node.keys:
                return count
        return len(keys)

    def _apply(self, node: _NodeBlocks, changes: BlockChanges) -> None:
        before = len(node.keys)
        for key in changes.dropped:
            node.keys.pop(_cut(key), None)
        node.keys.update((_cut(key), None) for key in changes.stored)
        node.sequence = changes.sequence
        self.held += len(node.keys) - before
        while self.held > self.keys_most:
            self._shed()

    def _shed(self) -> None:
        largest = max(self.nodes.values(), key=lambda each: len(each.keys))
        for key in list(largest.keys)[: max(1, len(largest.keys) // 8)]:
            del largest.keys[key]
            self.held -= 1

    def _clear(self, node: _NodeBlocks) -> None:
        self.held -= len(node.keys)
        node.keys = {}
        node.waiting = []


def _cut(key: bytes) -> int:
    return int.from_bytes(key[:_KEY_BYTES], "big")

"""The engine's own KV memory: a fixed pool of blocks, and the table of blocks of one sequence.

```
pool.keys, pool.values   [layers, kv_heads, blocks, block_tokens, head_dim]
table of a sequence      position p lives in block table[p // block_tokens], place p % block_tokens
```

Blocks are reserved for the worst case when a sequence is admitted, so a running sequence never waits for memory and
nothing can deadlock. A run of neighbouring blocks is preferred, because it can be read as a view without copying; a
scattered table is gathered, and gives the same bits. Invariant: free + held = total. Not thread-safe: the step thread
owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engines.reference.kv_cache import BlockArray, BlockShape

Array = NDArray[np.float32]

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockTable:
    """The blocks one sequence holds, in order of position."""

    __slots__ = ("blocks", "first_slot", "slots")

    def __init__(self, blocks: Sequence[int]) -> None:
        """`blocks` are indices into the pool; `first_slot` is set when they are neighbours."""
        self.blocks = np.asarray(blocks, dtype=np.intp)
        self.slots = (self.blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
        neighbours = bool(np.all(np.diff(self.blocks) == 1))
        self.first_slot: int | None = int(self.slots[0]) if neighbours else None

    @property
    def span(self) -> NDArray[np.intp] | slice:
        """All its slots, as an index of the pool: a slice, ten times as fast, where they are neighbours."""
        return self.slots if self.first_slot is None else slice(self.first_slot, self.first_slot + len(self.slots))


class BlockPool:
    """A fixed number of blocks for one model."""

    def __init__(self, shape: BlockShape, blocks: int) -> None:
        """Reserve the address space of `blocks` blocks; the pages are touched when first used."""
        assert shape.block_tokens == BLOCK_TOKENS
        dims = (shape.layers, shape.kv_heads, blocks * BLOCK_TOKENS, shape.head_dim)
        self.shape = shape
        self.blocks_total = blocks
        self.keys = np.zeros(dims, np.float32)
        self.values = np.zeros(dims, np.float32)
        self._free = list(range(blocks))  # ascending, so that runs are found

    @property
    def blocks_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> BlockTable | None:
        """Reserve `count` zeroed blocks, neighbours where possible; None when fewer are free. O(free)."""
        if count > len(self._free):
            return None
        start = self._run_start(count) or 0
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        table = BlockTable(taken)
        # A stale NaN would outlive its mask, because 0 * NaN is NaN: never let one sequence see another's leavings.
        self.keys[:, :, table.span] = 0.0
        self.values[:, :, table.span] = 0.0
        return table

    def give_back(self, table: BlockTable) -> None:
        """Return the blocks of `table`; once only."""
        self._free.extend(table.blocks.tolist())
        self._free.sort()
        assert len(self._free) <= self.blocks_total
        table.blocks = table.blocks[:0]

    def write(self, layer: int, slots: NDArray[np.intp], keys: Array, values: Array) -> None:
        """Store `keys` and `values` `[rows, kv_heads, head_dim]` at `slots` `[rows]`."""
        self.keys[layer][:, slots] = keys.transpose(1, 0, 2)
        self.values[layer][:, slots] = values.transpose(1, 0, 2)

    def read(self, layer: int, table: BlockTable, blocks: int) -> tuple[Array, Array]:
        """K and V of the first `blocks` blocks, `[kv_heads, blocks * block_tokens, head_dim]` each. May be views."""
        tokens = blocks * BLOCK_TOKENS
        if table.first_slot is not None:
            span = slice(table.first_slot, table.first_slot + tokens)
            return self.keys[layer][:, span], self.values[layer][:, span]
        slots = table.slots[:tokens]
        return self.keys[layer].take(slots, axis=1), self.values[layer].take(slots, axis=1)

    def import_block(self, table: BlockTable, index: int, block: BlockArray) -> None:
        """Copy a stored block into place `index` of `table`."""
        span = self._span(table, index)
        self.keys[:, :, span] = block[:, 0]
        self.values[:, :, span] = block[:, 1]

    def export_block(self, table: BlockTable, index: int) -> BlockArray:
        """A copy of the block at place `index` of `table`, in the shape that block stores exchange."""
        span = self._span(table, index)
        return np.stack([self.keys[:, :, span], self.values[:, :, span]], axis=1)

    def _span(self, table: BlockTable, index: int) -> slice:
        first = int(table.blocks[index]) * BLOCK_TOKENS
        return slice(first, first + BLOCK_TOKENS)

    def _run_start(self, count: int) -> int | None:
        """Where in the free list the first run of `count` neighbours begins."""
        free = self._free
        for start in range(len(free) - count + 1):
            if free[start + count - 1] - free[start] == count - 1:
                return start
        return None

"""Blocks of the engine's pool: none is lost, none is shared, runs of neighbours are found."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engines.reference.kv_cache import BlockShape
from engines.reference.paged_kv import BLOCK_TOKENS, BlockPool, BlockTable, blocks_for

SHAPE = BlockShape(layers=2, kv_heads=2, block_tokens=BLOCK_TOKENS, head_dim=4)


def test_blocks_for_rounds_up() -> None:
    """16 tokens a block: 1 to 16 tokens are one block, 17 are two."""
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17, 33)] == [0, 1, 1, 2, 3]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
def test_free_and_held_blocks_are_always_all_blocks(actions: list[tuple[bool, int]]) -> None:
    """Invariant 12, over any order of taking and giving back; and no block is held twice."""
    pool, held = BlockPool(SHAPE, 16), list[BlockTable]()
    for takes, count in actions:
        if takes:
            table = pool.take(count)
            assert (table is None) == (count > 16 - sum(len(t.blocks) for t in held))
            held += [] if table is None else [table]
        elif held:
            pool.give_back(held.pop(count % len(held)))
        blocks = [int(block) for table in held for block in table.blocks]
        assert len(set(blocks)) == len(blocks)
        assert pool.blocks_free + len(blocks) == 16


def test_neighbouring_blocks_are_preferred() -> None:
    """With 0 to 7 free but for 2, three blocks are 3, 4, 5 and not 0, 1, 3."""
    pool = BlockPool(SHAPE, 8)
    first, second = pool.take(2), pool.take(1)
    assert first is not None
    assert second is not None
    pool.give_back(first)
    run = pool.take(3)
    assert run is not None
    assert run.blocks.tolist() == [3, 4, 5]
    scattered = pool.take(4)
    assert scattered is not None
    assert scattered.first_slot is None, "0, 1, 6, 7 are no neighbours"


def test_an_exported_block_can_be_imported_elsewhere() -> None:
    """Into another place of another table, unchanged, in the shape that stores exchange."""
    pool = BlockPool(SHAPE, 4)
    source, target = pool.take(1), pool.take(2)
    assert source is not None
    assert target is not None
    rows = np.arange(BLOCK_TOKENS * 2 * 4, dtype=np.float32).reshape(BLOCK_TOKENS, 2, 4)
    for layer in range(2):
        pool.write(layer, source.slots, rows + layer, rows * 10 + layer)
    block = pool.export_block(source, 0)
    assert block.shape == SHAPE.dimensions
    pool.import_block(target, 1, block)
    assert np.array_equal(pool.export_block(target, 1), block)
    keys, values = pool.read(1, target, 2)
    assert np.array_equal(keys[:, BLOCK_TOKENS:], (rows + 1).transpose(1, 0, 2))
    assert np.array_equal(values[:, BLOCK_TOKENS:], (rows * 10 + 1).transpose(1, 0, 2))


def test_a_block_is_clean_when_it_is_taken_again() -> None:
    """What one sequence left behind, NaN included, is not seen by the next."""
    pool = BlockPool(SHAPE, 1)
    first = pool.take(1)
    assert first is not None
    pool.keys[:] = np.nan
    pool.values[:] = np.nan
    pool.give_back(first)
    again = pool.take(1)
    assert again is not None
    assert not pool.export_block(again, 0).any()

"""Causal grouped-query attention of one sequence over its paged KV.

Queries are taken by the block their position lies in, and always see that whole block, the future masked out. So the
shape of each product, and the order of its additions, depends only on the query's own position: not on how the prompt
was cut into chunks, what was found in a cache, or who else is in the batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engines.reference.paged_kv import BLOCK_TOKENS, BlockPool, BlockTable

Array = NDArray[np.float32]

# Row i masks what lies after place i of a block: 0 or -inf, [block_tokens, block_tokens].
_FUTURE: Array = np.triu(np.full((BLOCK_TOKENS, BLOCK_TOKENS), -np.inf, np.float32), k=1)


def attend(queries: Array, first: int, pool: BlockPool, layer: int, table: BlockTable) -> Array:
    """Attention of `queries` `[rows, kv_heads, group, head_dim]` at positions `first`, `first + 1`, ...

    Their keys and values must be in the pool already. Gives `[rows, kv_heads * group * head_dim]`.
    """
    scaled = queries * np.float32(1.0 / math.sqrt(queries.shape[-1]))
    rows = len(queries)
    last_block = (first + rows - 1) // BLOCK_TOKENS
    keys, values = pool.read(layer, table, last_block + 1)
    if rows == 1:
        return _attend_block(scaled, first, keys, values).reshape(1, -1)
    attended = np.empty_like(queries)
    start = 0
    while start < rows:
        position = first + start
        stop = min(rows, start + BLOCK_TOKENS - position % BLOCK_TOKENS)
        seen = (position // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        attended[start:stop] = _attend_block(scaled[start:stop], position, keys[:, :seen], values[:, :seen])
        start = stop
    return attended.reshape(rows, -1)


def _attend_block(scaled: Array, position: int, keys: Array, values: Array) -> Array:
    """Queries of one block against `[kv_heads, seen, head_dim]` keys and values, whose last block is theirs."""
    scores: Array = np.matmul(scaled, keys.transpose(0, 2, 1))
    place = position % BLOCK_TOKENS
    scores[..., -BLOCK_TOKENS:] += _FUTURE[place : place + len(scaled), None, None, :]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Array = np.matmul(scores, values)
    mixed /= scores.sum(axis=-1, keepdims=True)
    return mixed

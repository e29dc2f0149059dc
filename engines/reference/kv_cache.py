"""The port through which an engine reuses KV blocks that were computed before, here or elsewhere.

The engine knows blocks by key only (`roundhouse.block_keys.prefix_block_keys`); where they live, how long, and for whom
is the store's business. Two rules make a store safe to lose: a failed or late lookup is a miss, and an offer may be
dropped. Neither is an error and neither may change the text (invariant 11).

One block is one float32 array `[layers, 2, kv_heads, block_tokens, head_dim]`, C order; index 0 of the second axis is K
(after the rotary embedding), index 1 is V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BlockArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one block of one model; a store refuses (as a miss) what was stored under another shape."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int

    @property
    def dimensions(self) -> tuple[int, int, int, int, int]:
        """`(layers, 2, kv_heads, block_tokens, head_dim)`."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of one block in float32."""
        return self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class BlockSpace:
    """In whose space the blocks of one request live, and where else they may be.

    `shared_blocks` leading blocks are of a sharing group, whose salt keys them; the others are the tenant's own. Of
    `peers`, kvstores of other nodes, the store may fetch what it lacks; `hold` is a handle there that keeps it for us.
    """

    salt: bytes
    shared_salt: bytes = b""
    shared_blocks: int = 0
    peers: tuple[str, ...] = ()
    hold: str = ""


def _nothing_held() -> None:
    """The release of a prefix that holds nothing."""


def _all_right(blocks: int) -> int:
    """The check of arrays that nobody else can change."""
    return blocks


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Blocks found for the first `len(blocks)` keys of a lookup.

    The arrays may be views of shared memory. The engine copies them into its own pool, then asks `verified(n)` how many
    of the first n were right when it copied them (the others it computes), and then calls `release` exactly once, also
    when it drops the request; after that it never reads them again. `more`: how many blocks after these probably lie
    where a lookup that waits would find them.
    """

    blocks: tuple[BlockArray, ...] = ()
    release: Callable[[], None] = _nothing_held
    verified: Callable[[int], int] = _all_right
    more: int = 0


class BlockStore(Protocol):
    """What an engine asks of a store of KV blocks. Safe to call from several threads."""

    def lookup(self, space: BlockSpace, keys: Sequence[bytes], patience_ms: int = 0) -> CachedPrefix:
        """Find the longest prefix of `keys` that is stored in `space`, which the keys were made for (invariant 11).

        With `patience_ms` 0 only what is in memory, within milliseconds; else also what comes from disk or another node
        by then. Answers an empty prefix on a miss, a late answer or any failure. Never raises."""
        ...

    def offer(self, space: BlockSpace, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
        """Hand over new blocks for the last `len(blocks)` of `keys`; ownership of the arrays passes to the store.

        `keys` is the chain from the first block of the prompt, because a block without its parents is never found.
        Called on the step thread: returns at once, stores later or never (a full queue drops the offer). Never raises.
        """
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was offered is stored or dropped; False when the time ran out first."""
        ...

    def close(self) -> None:
        """Let go of every lease and connection. Idempotent."""
        ...


class NoBlockStore:
    """The store of an engine that runs without one: every lookup misses, every offer is dropped."""

    def lookup(self, space: BlockSpace, keys: Sequence[bytes], patience_ms: int = 0) -> CachedPrefix:
        """Miss."""
        return CachedPrefix()

    def offer(self, space: BlockSpace, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
        """Drop."""

    def flush(self, timeout_s: float) -> bool:
        """There is nothing to wait for."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def open_block_store(parameters: Mapping[str, str], shape: BlockShape) -> BlockStore:
    """The store named by the model parameter `kvstore_address`; empty or absent means none.

    The client is imported only when it is needed: engines without a store start faster, and need no gRPC.
    `engines.reference.kvstore_client` provides `connect(address, shape, parameters) -> BlockStore`, which must not wait
    for the peer: a store that is not up yet is a store that misses.
    """
    address = parameters.get("kvstore_address", "")
    if not address:
        return NoBlockStore()
    from engines.reference.kvstore_client import connect

    store: BlockStore = connect(address, shape, parameters)
    return store

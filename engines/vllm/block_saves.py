"""What of each request is in the kvstore, and what becomes whole in a step: the bookkeeping of the vLLM connector.

Pure: knows neither vLLM nor gRPC, so it is tested without them. Blocks are vLLM's: of its block size, in its layout.
The layout goes into the model digest of the keys, so that blocks of another engine, type or shape are other blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from roundhouse.block_keys import prefix_block_keys

LAYOUT_SCHEME = b"roundhouse/vllm-layout/v1"


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Blocks of a request that are whole after this step, and where vLLM has them."""

    request_id: str
    salt: bytes
    parent_key: bytes  # empty = first block of the prompt
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class TrackedRequest:
    """One request that vLLM runs. `token_ids` grow while it generates."""

    salt: bytes
    adapter_digest: bytes
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    stored: int = 0  # leading blocks that are in the kvstore, or were offered


def layout_digest(model_digest: bytes, dtype: str, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """The digest that keys name instead of the model's: model, number format, shape of a block in each layer."""
    text = repr((model_digest.hex(), dtype, tuple(shapes))).encode()
    return hashlib.sha256(LAYOUT_SCHEME + text).digest()


def keys_of(tracked: TrackedRequest, digest: bytes, block_tokens: int, tokens: int) -> list[bytes]:
    """Keys of the whole blocks of the first `tokens` tokens."""
    return prefix_block_keys(tracked.salt, digest, tracked.adapter_digest, block_tokens, tracked.token_ids[:tokens])


def save_plan(
    request_id: str, tracked: TrackedRequest, digest: bytes, block_tokens: int, computed: int
) -> SavePlan | None:
    """What to store once `computed` tokens have been computed; notes it as stored. None if nothing is new."""
    keys = keys_of(tracked, digest, block_tokens, min(computed, len(tracked.token_ids)))
    first, stop = tracked.stored, min(len(keys), len(tracked.block_ids))
    if first >= stop:
        return None
    tracked.stored = stop
    parent = keys[first - 1] if first else b""
    return SavePlan(request_id, tracked.salt, parent, tuple(keys[first:stop]), tuple(tracked.block_ids[first:stop]))

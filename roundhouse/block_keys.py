"""Names of KV cache blocks and of the space each tenant's blocks live in.

A block key is a SHA-256 chain: every field goes into the hash with a tag and its length, so that no field can be read
as another and no two lists of fields give the same bytes (case B25). The key of a block holds its parent's key, and so
everything before it; the model and the adapter are named by content digest, never by name (case B26).

Pure: no I/O, no state, no seed of the process. The same input gives the same key on every node and in every release
that writes `v1`; `tests/unit/golden/block_keys.json` pins it. Decision: docs/decisions/0050-block-keys.md.
"""

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

BLOCK_SCHEME = b"roundhouse/block/v1"
SALT_SCHEME = b"roundhouse/salt/v1"
KEY_BYTES = 32  # SHA-256

_FIELD = struct.Struct("<BQ")  # tag, length of what follows
_TOKEN_BYTES = 4  # u32: larger than any vocabulary


class _Tag(IntEnum):
    """What a field means. Numbers are part of the scheme: never reuse one."""

    SCHEME = 1
    SALT = 2
    MODEL = 3
    ADAPTER = 4
    BLOCK_TOKENS = 5
    PARENT = 6
    TOKENS = 7
    CLUSTER = 8
    TENANT = 9
    GROUP = 10


class SharedBeginning(NamedTuple):
    """How many leading blocks of a prompt are keyed with the salt of a sharing group instead of the tenant's own."""

    salt: bytes = b""
    blocks: int = 0


OWN_SPACE_ONLY = SharedBeginning()


def prefix_block_keys(
    salt: bytes,
    model_digest: bytes,
    adapter_digest: bytes,
    block_tokens: int,
    token_ids: Sequence[int],
    shared: SharedBeginning = OWN_SPACE_ONLY,
) -> list[bytes]:
    """Keys of the whole blocks of a prompt, first to last; a last part shorter than `block_tokens` has no key.

    `adapter_digest` is empty for the base model. Blocks of a `shared` beginning have equal keys for every member of the
    group; those after it have the tenant's salt and, by their parent, the group's too. O(tokens); about 1 µs a block of
    16. Raises ValueError if `block_tokens` is not positive or a token id does not fit 32 bits.
    """
    if block_tokens <= 0:
        raise ValueError(f"a block holds at least one token, not {block_tokens}")
    blocks = len(token_ids) // block_tokens
    tokens = _token_bytes(token_ids[: blocks * block_tokens])
    size = block_tokens * _TOKEN_BYTES
    after_salt = (
        _field(_Tag.MODEL, model_digest)
        + _field(_Tag.ADAPTER, adapter_digest)
        + _field(_Tag.BLOCK_TOKENS, struct.pack("<Q", block_tokens))
    )
    own, common = (
        hashlib.sha256(_field(_Tag.SCHEME, BLOCK_SCHEME) + _field(_Tag.SALT, each) + after_salt)
        for each in (salt, shared.salt)
    )
    root, child = _FIELD.pack(_Tag.PARENT, 0), _FIELD.pack(_Tag.PARENT, KEY_BYTES)
    tokens_follow = _FIELD.pack(_Tag.TOKENS, size)
    keys: list[bytes] = []
    parent = root
    for number, first in enumerate(range(0, len(tokens), size)):
        state = (common if number < shared.blocks else own).copy()
        state.update(parent + tokens_follow + tokens[first : first + size])
        key = state.digest()
        keys.append(key)
        parent = child + key
    return keys


def tenant_salt(cluster: str, tenant_id: str) -> bytes:
    """The salt of a tenant's cache space, 32 bytes. `cluster` is the cluster's secret, or its name if it has none.

    Only from the authenticated tenant, never from a request body (invariants 11 and 16).
    """
    return hashlib.sha256(
        _field(_Tag.SCHEME, SALT_SCHEME)
        + _field(_Tag.CLUSTER, cluster.encode())
        + _field(_Tag.TENANT, tenant_id.encode())
    ).digest()


def group_salt(cluster: str, group: str) -> bytes:
    """The salt of a sharing group's cache space; no tenant of whatever name has it. As `tenant_salt` otherwise."""
    return hashlib.sha256(
        _field(_Tag.SCHEME, SALT_SCHEME) + _field(_Tag.CLUSTER, cluster.encode()) + _field(_Tag.GROUP, group.encode())
    ).digest()


def _field(tag: _Tag, value: bytes) -> bytes:
    return _FIELD.pack(tag, len(value)) + value


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError("a token id is an integer of 0 to 2^32 - 1") from error

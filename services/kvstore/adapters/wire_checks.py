"""What a request may hold, checked before anything is done. Errors never show a key or a salt (invariant 16)."""

from collections.abc import Iterable

from roundhouse.block_keys import KEY_BYTES
from roundhouse.errors import InvalidInput
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.domain.records import NOTHING_SHARED, Holder, Shared

KEYS_MAX = 65_536  # a prompt of a million tokens in blocks of 16
SALT_BYTES_MAX = 256
DIGEST_BYTES_MAX = 256  # as a header on disk holds
CLIENT_ID_CHARACTERS_MAX = 128
SNAPSHOT_KEY_BYTES_MIN = 8  # fewer would often be another key's


def check_salt(salt: bytes, param: str = "salt") -> None:
    """Raises InvalidInput."""
    if not salt or len(salt) > SALT_BYTES_MAX:
        raise InvalidInput(f"1 to {SALT_BYTES_MAX} bytes are expected", param=param)


def check_digest(digest: bytes) -> None:
    """Raises InvalidInput."""
    if len(digest) > DIGEST_BYTES_MAX:
        raise InvalidInput(f"at most {DIGEST_BYTES_MAX} bytes are expected", param="model_digest")


def check_keys(keys: Iterable[bytes], count_max: int) -> tuple[bytes, ...]:
    """The keys. Raises InvalidInput."""
    found = tuple(keys)
    if len(found) > count_max:
        raise InvalidInput(f"at most {count_max} keys at once", param="keys")
    if set(map(len, found)) - {KEY_BYTES}:
        raise InvalidInput(f"a key has {KEY_BYTES} bytes", param="keys")
    return found


def holder_of(client_id: str, lease_ms: int, param: str = "client_id") -> Holder:
    """Who wants a lease. Raises InvalidInput."""
    if not client_id or len(client_id) > CLIENT_ID_CHARACTERS_MAX:
        raise InvalidInput(f"1 to {CLIENT_ID_CHARACTERS_MAX} characters are expected", param=param)
    return Holder(client_id, lease_ms)


def shared_of(message: kv_pb2.SharedPrefix) -> Shared:
    """The part of a chain in a sharing group's space. Raises InvalidInput."""
    if not message.blocks:
        return NOTHING_SHARED
    check_salt(message.salt, "shared")
    return Shared(message.salt, message.blocks)


def key_bytes_of(request: kv_pb2.SnapshotRequest) -> int:
    """How much of each key a snapshot is to have. Raises InvalidInput."""
    size = request.key_bytes or KEY_BYTES
    if not SNAPSHOT_KEY_BYTES_MIN <= size <= KEY_BYTES:
        raise InvalidInput(f"{SNAPSHOT_KEY_BYTES_MIN} to {KEY_BYTES} are expected", param="key_bytes")
    return size

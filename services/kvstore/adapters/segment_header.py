"""The page before each block in a segment: what follows it, believed only if it was written for exactly this place.

```
plain     magic | state, lengths, checksum, fields | zeros ... | checksum of page, segment and offset
sealed    magic | nonce | the same text, encrypted and bound to segment and offset | zeros
```

A dead header names nobody. Source of the idea: log-structured stores (Rosenblum and Ousterhout, 1992).
"""

import errno
import mmap
import struct

import xxhash

from services.kvstore.adapters.tenant_keys import TAG_BYTES, TenantKeys
from services.kvstore.domain.disk_index import DiskRecord

PAGE = 4096  # the largest logical block size of common disks
PLAIN_MAGIC, SEALED_MAGIC = b"RHKVSEG2", b"RHKVSEC2"
ALIVE, DEAD = 1, 0
FIELD_BYTES_MAX = 256
_HEAD = struct.Struct("<BQQHHHHH")  # state, length, checksum; lengths of key, parent, salt, model digest, seal
_CHECK = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
_TEXT_BYTES = 2048  # of a sealed header; five fields fit


def padded(length: int) -> int:
    """`length` in whole pages."""
    return -(-length // PAGE) * PAGE


def span_of(length: int) -> int:
    """Bytes that a block of `length` takes in a segment."""
    return PAGE + padded(length)


def header_page(record: DiskRecord, state: int, keys: TenantKeys | None) -> mmap.mmap:
    """A page for the start of a record at its place, aligned. Raises OSError if a name is too long."""
    alive = state == ALIVE
    named = (record.key, record.parent_key, record.salt, record.model_digest, record.seal)
    fields = named if alive else (b"",) * len(named)
    if any(len(value) > FIELD_BYTES_MAX for value in fields):
        raise OSError(errno.EINVAL, "a name of the block is too long")
    text = _HEAD.pack(state, record.length, record.checksum if alive else 0, *map(len, fields)) + b"".join(fields)
    place = _PLACE.pack(record.segment, record.offset)
    page = mmap.mmap(-1, PAGE)
    if keys is not None:
        sealed = SEALED_MAGIC + keys.seal_header(text.ljust(_TEXT_BYTES, b"\0"), place)
        page[: len(sealed)] = sealed
    else:
        page[: len(PLAIN_MAGIC) + len(text)] = PLAIN_MAGIC + text
        page[PAGE - _CHECK.size :] = _CHECK.pack(xxhash.xxh3_64_intdigest(place + page[: -_CHECK.size]))
    return page


def parsed(page: bytes, segment: int, offset: int, keys: TenantKeys | None) -> tuple[DiskRecord, int] | None:
    """The record and its state; None if the page is no header of this place, or of the other kind."""
    place = _PLACE.pack(segment, offset)
    text = _plain_text(page, place) if keys is None else _sealed_text(page, place, keys)
    if text is None:
        return None
    state, length, checksum, *sizes = _HEAD.unpack_from(text)
    fields, at = [], _HEAD.size
    for size in sizes:
        fields.append(bytes(text[at : at + size]))
        at += size
    key, parent, salt, model_digest, seal = fields
    record = DiskRecord(key, salt, model_digest, parent, length, checksum, segment, offset, span_of(length), seal)
    return record, state


def _plain_text(page: bytes, place: bytes) -> bytes | None:
    body = page[: -_CHECK.size]
    if not body.startswith(PLAIN_MAGIC) or _CHECK.unpack(page[-_CHECK.size :])[0] != xxhash.xxh3_64_intdigest(
        place + body
    ):
        return None
    return body[len(PLAIN_MAGIC) :]


def _sealed_text(page: bytes, place: bytes, keys: TenantKeys) -> bytes | None:
    if not page.startswith(SEALED_MAGIC):
        return None
    start = len(SEALED_MAGIC)
    return keys.open_header(page[start : start + 12 + _TEXT_BYTES + TAG_BYTES], place)

"""Short ways to name and store KV blocks in tests of the kvstore."""

import random
from collections.abc import Sequence

from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import ROOT, Acquired, Holder, NewBlocks, Reserved, WrittenBlock
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.fetch_blocks import Wanted
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import BlockArena

SALT = b"tenant one"
OTHER_SALT = b"tenant two"
MODEL = b"sha256:model"
HOLDER = Holder("engine-1", lease_ms=1_000)
UNIT = 64  # bytes of the smallest slot in these tests


def chain(name: str, blocks: int) -> list[bytes]:
    """Keys of a prompt of `blocks` blocks: name/0, name/1, ..."""
    return [f"{name}/{number}".encode() for number in range(blocks)]


def table_of(units: int, *, extent_units: int = 1) -> BlockTable:
    """A table over an arena of `units` slots of 64 bytes."""
    return BlockTable(SlotArena(units * UNIT, UNIT, extent_units * UNIT), "run1")


def new_blocks(
    keys: Sequence[bytes], *, salt: bytes = SALT, parent: bytes = ROOT, length: int = UNIT, model: bytes = MODEL
) -> NewBlocks:
    """What a writer asks for."""
    return NewBlocks(salt, model, parent, tuple(keys), length)


def content_of(key: bytes, length: int) -> bytes:
    """What the block of a key holds."""
    return random.Random(key).randbytes(length)


async def read_rightly(service: BlockService, arena: BlockArena, wanted: Wanted, wait_ms: int) -> int:
    """How many leading blocks a reader who waits gets; each one is byte for byte `content_of` its key."""
    outcome = await service.acquire_waiting(wanted, HOLDER, wait_ms)
    if not isinstance(outcome, Acquired):
        return 0
    for place in outcome.blocks:
        with arena.view(place.offset, place.length) as view:
            assert bytes(view) == content_of(place.key, place.length)
    await service.release(outcome.lease_id)
    return len(outcome.blocks)


def store(table: BlockTable, keys: Sequence[bytes], now_ms: int = 0, **fields: object) -> int:
    """Reserve and commit `keys`; returns how many became visible."""
    reserved = table.reserve(new_blocks(keys, **fields), HOLDER, now_ms)  # type: ignore[arg-type]
    if not isinstance(reserved, Reserved):
        return 0
    return table.commit(reserved.lease_id, written_well(reserved), now_ms).committed


def written_well(reserved: Reserved) -> list[WrittenBlock]:
    """Every reserved slot filled with what its writer claims; the checksum is the offset, which is unique."""
    return [WrittenBlock(place.key, place.offset + 1, place.offset + 1) for place in reserved.slots]


def found(table: BlockTable, keys: Sequence[bytes], now_ms: int = 0, *, salt: bytes = SALT) -> int:
    """How many leading blocks of `keys` are there; the lease is released at once."""
    acquired = table.acquire(salt, keys, HOLDER, now_ms)
    if not isinstance(acquired, Acquired):
        return 0
    table.release(acquired.lease_id, now_ms)
    return len(acquired.blocks)

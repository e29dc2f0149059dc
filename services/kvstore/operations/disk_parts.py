"""What a disk tier is put together from, what it counts, and what it is reading."""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from roundhouse.clock import Clock
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.disk_index import DiskIndex, DiskRecord
from services.kvstore.domain.records import WrittenBlock
from services.kvstore.ports import BlockArena, BlockLog


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Blocks since the start, and what is there now; `bytes_held` includes dead records."""

    bytes_total: int = 0
    bytes_held: int = 0
    blocks: int = 0
    written: int = 0
    promoted: int = 0
    dropped: int = 0
    refused: int = 0
    corrupt: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class DiskParts:
    """What a disk tier works with. `slots_are_pages`: every slot begins and ends at a page."""

    table: BlockTable
    arena: BlockArena
    blocks: BlockLog
    index: DiskIndex
    clock: Clock
    threads: Executor
    segment_bytes: int
    slots_are_pages: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """A chunk of a chain that is being read into reserved slots: `records`, of the `wanted` blocks that it has."""

    lease_id: str
    salt: bytes
    records: list[DiskRecord]
    wanted: int
    lanes: asyncio.Future[list[list[WrittenBlock | None]]]

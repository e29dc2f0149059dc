"""A kvstore with a disk, without a process, for tests of the disk tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from services.kvstore.adapters.segment_files import SegmentFiles
from services.kvstore.adapters.segment_header import span_of
from services.kvstore.adapters.tenant_keys import TenantKeys
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.disk_index import DiskIndex
from services.kvstore.domain.records import Reserved
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.disk_parts import DiskParts
from services.kvstore.operations.disk_tier import DiskTier
from services.kvstore.operations.fetch_blocks import Wanted
from services.kvstore.operations.serve_blocks import BlockService
from tests.builders.kv_blocks import HOLDER, SALT, content_of, new_blocks, read_rightly
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock

LENGTH = 5_000  # two pages: a record is 3 pages, 12,288 bytes
SLOT = 8_192
SEGMENT = 4 * span_of(LENGTH)


def content(key: bytes) -> bytes:
    """What the block of a key holds."""
    return content_of(key, LENGTH)


class Node:
    """A kvstore of 8 slots over a folder; `restart` keeps the folder only."""

    def __init__(
        self, folder: Path, capacity: int = 8 * SEGMENT, salt_bytes_max: int = 0, cluster_key: bytes = b""
    ) -> None:
        self.cluster_key = cluster_key
        self.folder, self.capacity, self.salt_bytes_max = folder, capacity, salt_bytes_max
        self.clock = ManualClock()
        self.threads = ThreadPoolExecutor(1)
        self.files: SegmentFiles | None = None

    async def start(self) -> Node:
        """An empty arena over what the folder holds."""
        if self.files is not None:
            self.files.close()
        keys = TenantKeys(self.folder / "keys", self.cluster_key) if self.cluster_key else None
        self.files = SegmentFiles(self.folder, SEGMENT, keys=keys)
        self.arena = FakeArena(8 * SLOT)
        self.table = BlockTable(SlotArena(8 * SLOT, SLOT, SLOT), "run")
        self.index = DiskIndex(self.capacity, SEGMENT, self.salt_bytes_max)
        parts = DiskParts(self.table, self.arena, self.files, self.index, self.clock, self.threads, SEGMENT, True)
        self.disk = DiskTier(parts)
        await self.disk.open()
        self.service = BlockService(self.table, self.arena, self.clock, self.disk)
        return self

    def close(self) -> None:
        """Nothing stays open."""
        self.threads.shutdown()
        if self.files is not None:
            self.files.close()

    async def store(self, keys: list[bytes], salt: bytes = SALT, parent: bytes = b"") -> None:
        """Write blocks and publish them."""
        reserved = self.service.reserve(new_blocks(keys, salt=salt, parent=parent, length=LENGTH), HOLDER)
        assert isinstance(reserved, Reserved)
        claims = {}
        for place in reserved.slots:
            with self.arena.view(place.offset, LENGTH) as view:
                view[:] = content(place.key)
            claims[place.key] = xxhash.xxh3_64_intdigest(content(place.key))
        assert (await self.service.commit(reserved.lease_id, claims)).committed == len(reserved.slots)

    async def store_and_use(self, keys: list[bytes], salt: bytes = SALT) -> None:
        """Blocks that earned their place, written."""
        await self.store(keys, salt)
        assert await self.found(keys, salt) == len(keys)
        await self.disk.write_turn()

    async def found(self, keys: list[bytes], salt: bytes = SALT) -> int:
        """How many leading blocks a patient reader gets; each one is byte for byte what was stored."""
        return await read_rightly(self.service, self.arena, Wanted(salt, tuple(keys)), 10_000)

    def file_bytes(self) -> bytes:
        """All that lies on the disk."""
        return b"".join(path.read_bytes() for path in sorted(self.folder.glob("*.segment")))

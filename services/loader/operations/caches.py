"""The tiers below the device: verified weights on disk, and the copy of them in host memory.

Disk bytes are reserved before the first one is copied and committed when the copy was verified; old weights that nobody
uses leave first, least recently used first. Host memory has no arena of its own yet: the page cache holds what was read
lately, and this tier only keeps the account of it, so nothing is refused for lack of host memory
(docs/decisions/0042-host-tier.md).
"""

import asyncio
from collections import defaultdict
from pathlib import Path

from roundhouse.catalogue.records import Model
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, InvalidInput
from roundhouse.vocabulary import Digest
from services.loader.domain import instance as words
from services.loader.domain.memory_ledger import NoRoom
from services.loader.operations.admission import check_disk, host_evictions
from services.loader.operations.node import Node, Residence
from services.loader.operations.steps import Steps
from services.loader.ports import CachedVersion, WeightCache


class CacheTiers:
    """The only writer of the disk and host ledgers."""

    def __init__(self, node: Node, steps: Steps, cache: WeightCache, clock: Clock) -> None:
        self._node = node
        self._steps = steps
        self._cache = cache
        self._clock = clock
        self._one_at_a_time: defaultdict[Digest, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self) -> None:
        """Take over what an earlier process cached; what does not fit the disk tier any more is deleted."""
        found = await self._cache.start()
        for cached in sorted(found, key=lambda cached: cached.last_used_ms, reverse=True):
            ledger = self._node.disk.reserve(cached.digest, cached.size)
            if isinstance(ledger, NoRoom):
                await self._cache.remove(cached.digest)
                continue
            self._node.disk = ledger.commit(cached.digest)
            self._node.disk_used_ms[cached.digest] = cached.last_used_ms

    async def size(self, model: Model) -> int:
        """Bytes of a version's weights. Raises NotFound, InvalidInput."""
        held = self._node.disk.held_by(model.digest)
        return held.total or await self._cache.measure(model.source_path)

    async def path(self, digest: Digest) -> Path:
        """Where the verified weights lie. Raises InvalidInput: they were changed or deleted meanwhile."""
        cached = await self._cache.find(digest)
        if cached is None:
            raise InvalidInput("the cached weights were changed or deleted by someone else")
        return cached.path

    async def stage(self, home: Residence) -> None:
        """Make sure that the weights are on disk and verified. Callers with the same weights share one copy.

        Raises NotFound, InvalidInput, CapacityExhausted, Unavailable; the ledger is then as it was before."""
        digest = home.instance.version.digest
        async with self._one_at_a_time[digest]:
            cached = await self._cache.find(digest)
            if cached is None:
                self._forget_on_disk(digest)
                await self._make_disk_room(digest, home.bytes_total)
                cached = await self._copy(home, digest)
            home.bytes_done = home.bytes_total = cached.size
            self._node.disk_used_ms[digest] = self._clock.now_ms()
        for other in self._node.sharing(digest):
            self._steps.take(other.instance.version, words.FoundOnDisk())

    def count_in_host_memory(self, digest: Digest, size: int) -> None:
        """Account for what a load left in the page cache. Idempotent."""
        evicted = host_evictions(self._node, digest, size)
        if evicted is None:
            return
        for other in evicted:
            self._node.host = self._node.host.release(other)
        if digest not in self._node.host.holdings:
            ledger = self._node.host.reserve(digest, size)
            assert not isinstance(ledger, NoRoom)
            self._node.host = ledger.commit(digest)
        self._node.host_used_ms[digest] = self._clock.now_ms()

    async def _copy(self, home: Residence, digest: Digest) -> CachedVersion:
        def on_bytes(done: int) -> None:
            home.bytes_done = done
            self._node.progress.notify()

        try:
            cached = await self._cache.stage(
                home.model.source_path, digest, size_max=home.bytes_total, on_bytes=on_bytes
            )
        except BaseException:
            self._node.disk = self._node.disk.release(digest)
            raise
        ledger = self._node.disk.commit(digest).resize(digest, cached.size)
        assert not isinstance(ledger, NoRoom), "what was copied is not larger than what was reserved"
        self._node.disk = ledger
        return cached

    async def _make_disk_room(self, digest: Digest, size: int) -> None:
        evicted = check_disk(self._node, digest, size)
        self._node.disk = self._node.disk.reserve_up_to(digest, size)
        self._node.disk_leaving.update(evicted)
        try:
            for other in evicted:
                await self._evict(other)
                self._node.disk = self._node.disk.reserve_up_to(digest, size)
        finally:
            self._node.disk_leaving.difference_update(evicted)
        if (missing := size - self._node.disk.held_by(digest).reserved) > 0:
            self._node.disk = self._node.disk.release(digest)
            raise CapacityExhausted(f"{missing} bytes of disk are missing: cached weights came into use meanwhile")

    async def _evict(self, digest: Digest) -> None:
        async with self._one_at_a_time[digest]:
            if digest not in self._node.digests_in_use():
                await self._cache.remove(digest)
                self._forget_on_disk(digest)

    def _forget_on_disk(self, digest: Digest) -> None:
        self._node.disk = self._node.disk.release(digest)
        self._node.disk_used_ms.pop(digest, None)
        for home in self._node.sharing(digest):
            self._steps.take(home.instance.version, words.DroppedFromDisk())

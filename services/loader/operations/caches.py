"""The tiers below the device: verified files on disk, and copies of them in the host arena.

Bytes are reserved before the first one moves and are there once they were verified; versions that nobody uses leave
first, least recently used first. Files that versions share are kept once. Host memory is a help, not a need: what does
not fit there is loaded from disk, so nothing is refused for lack of it (docs/decisions/0042-host-tier.md).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import Digest
from services.loader.domain import instance as words
from services.loader.domain.contents import ContentLedger, Piece
from services.loader.domain.host_arena import HostArena, Range, Settled
from services.loader.domain.memory_ledger import NoRoom
from services.loader.domain.rates import Way
from services.loader.domain.staging_priority import Priority
from services.loader.operations.admission import check_disk, pieces_of
from services.loader.operations.leavers import Leavers
from services.loader.operations.node import Node, Weights
from services.loader.operations.staging import Staging, Stagings
from services.loader.operations.steps import Steps
from services.loader.operations.traffic import TrafficLane
from services.loader.ports import (
    ArenaView,
    CachedVersion,
    Filling,
    FoundOnDisk,
    HostVersion,
    StageRequest,
    WeightArena,
    WeightCache,
)

log = structlog.get_logger(__name__)

INTERRUPTED = "interrupted:"
"""Before the key of a half-fetched file, where its bytes stand in the account of the disk like a version's."""


class CacheTiers:
    """The only writer of the disk and host accounts."""

    def __init__(
        self,
        node: Node,
        steps: Steps,
        cache: WeightCache,
        arena: WeightArena,
        stagings: Stagings,
        leavers: Leavers,
        clock: Clock,
    ) -> None:
        self._node = node
        self._steps = steps
        self._cache = cache
        self._arena = arena
        self._stagings = stagings
        self._leavers = leavers
        self._clock = clock
        self._removing = asyncio.Lock()
        """Held while files are deleted and while one looks which are there: neither may see half of the other."""
        self._recording = asyncio.Lock()

    async def start(self) -> None:
        """Take over what an earlier process left; what does not fit the disk tier any more is deleted."""
        found = await self._cache.start()
        await self._take_over_disk(found)
        ranges = await self._arena.start()
        self._node.host = HostArena(ContentLedger(self._arena.capacity), self._arena.page)
        for version in ranges:
            self._take_over_host(version)

    async def look(self, weights: Weights) -> tuple[ContentFile, ...]:
        """The files of a version. Raises NotFound, InvalidInput, Unavailable."""
        cached = self._node.on_disk.get(weights.digest)
        return cached.files if cached is not None else await self._cache.look(_request(weights))

    async def path(self, digest: Digest) -> Path:
        """Where the verified weights lie. Raises InvalidInput: they were changed or deleted meanwhile."""
        cached = await self._cache.find(digest)
        if cached is None:
            raise InvalidInput("the cached weights were changed or deleted by someone else")
        return cached.path

    def view(self, digest: Digest) -> ArenaView | None:
        """Where an engine finds the version in host memory; None if it is not there."""
        cached = self._node.on_disk.get(digest)
        if cached is None or not self._node.host.ledger.is_whole(digest):
            return None
        self._node.host_used_ms[digest] = self._clock.now_ms()
        held = self._node.host.ranges
        ranges = {file.name: (held[file.sha256].offset, file.size) for file in cached.files if file.sha256 in held}
        return ArenaView(self._arena.path, ranges)

    async def stage(self, weights: Weights, priority: Priority, *, to_host: bool = True) -> None:
        """Make sure that the weights are on disk and verified, and in host memory if their engine maps it.

        Callers with the same weights share one copy. Raises NotFound, InvalidInput, CapacityExhausted, Unavailable;
        the accounts are then as they were before."""

        async def work(staging: Staging, lane: TrafficLane) -> None:
            host_leg = staging.legs[Way.TO_HOST]
            if to_host and self._arena.capacity and weights.files:
                names = weights.mapped(weights.files)
                host_leg.total = sum(file.size for file in weights.files if file.name in names)  # for the estimate
            await self._to_disk(staging, lane, weights)
            host_leg.total = 0
            if to_host:
                await self._to_host(staging, lane, weights)

        while True:
            others = self._stagings.find(weights.digest)
            await self._stagings.join(weights.digest, priority, work)
            if others is None or not to_host or self.is_in_host(weights):
                return
            to_host = await self._fits_host(weights)  # the one that was joined went to disk only
            if not to_host:
                return

    def promote(self, digest: Digest, priority: Priority) -> None:
        """Somebody with this priority waits for a version, if it is under way."""
        staging = self._stagings.find(digest)
        if staging is not None:
            staging.promote(priority)

    def is_in_host(self, weights: Weights) -> bool:
        """Whether host memory has all that the engine reads from there."""
        return self._node.host.ledger.is_whole(weights.digest)

    def check_disk(self, digest: Digest, files: Sequence[ContentFile]) -> None:
        """Raises InvalidInput with code NEVER_FITS, CapacityExhausted: the version could not be brought to disk now."""
        check_disk(self._node, digest, pieces_of(digest, files), self._stagings.digests())

    async def forget(self, digests: Sequence[Digest]) -> None:
        """Delete versions from disk that the account has let go already, with the files that nobody shares."""
        async with self._removing:
            for digest in digests:
                await self._delete(digest)
            self._node.tell()

    async def _fits_host(self, weights: Weights) -> bool:
        pieces = self._host_pieces(weights)
        settled = self._node.host.settle(weights.digest, pieces, self._unused_in_host())
        return bool(pieces) and isinstance(settled, Settled)

    async def _to_disk(self, staging: Staging, lane: TrafficLane, weights: Weights) -> None:
        digest = weights.digest
        cached = await self._cache.find(digest)
        if cached is not None and digest in self._node.on_disk:
            self._node.disk_used_ms[digest] = self._clock.now_ms()
            self._found(digest)
            return
        self._forget_on_disk(digest)
        files = await self._cache.look(_request(weights))
        staging.keys = frozenset(file.sha256 for file in files if file.sha256)
        await self._stagings.yield_to(staging)
        await self._reserve_disk(digest, pieces_of(digest, files))
        await self._fetch(staging, lane, weights, files)

    async def _reserve_disk(self, digest: Digest, pieces: Sequence[Piece]) -> None:
        resumed = [name for piece in pieces if (name := _interrupted(piece.key)) in self._node.disk.contents]
        self._node.disk = self._node.disk.release(*resumed)  # its bytes are now those of the version
        evicted = check_disk(self._node, digest, pieces, self._stagings.digests())
        ledger = self._node.disk.reserve(digest, pieces, evicted)
        assert isinstance(ledger, ContentLedger), "what was chosen is enough"
        self._leavers.leave_disk(evicted, digest)
        self._node.disk = ledger
        for other in evicted:
            self._gone_from_disk(other)
        try:
            await asyncio.shield(self.forget(evicted))
        except BaseException:
            self._node.disk = self._node.disk.release(digest)
            raise

    async def _fetch(self, staging: Staging, lane: TrafficLane, weights: Weights, files: Sequence[ContentFile]) -> None:
        digest, leg = weights.digest, staging.legs[Way.TO_DISK]
        leg.total, leg.began_ms = sum(file.size for file in files), self._clock.monotonic_ms()

        def on_bytes(done: int) -> None:
            leg.done = min(done, leg.total)
            self._node.progress.notify()

        request = StageRequest(weights.source, digest, tuple(files) if files[0].sha256 else (), leg.total)
        try:
            cached = await self._cache.stage(request, lane, on_bytes)
        except BaseException:
            keys = [piece.key for piece in pieces_of(digest, files)]
            self._node.disk = self._node.disk.release(digest)
            await asyncio.shield(self._drop_unheld(keys))
            raise
        self._node.disk = self._node.disk.commit(digest, pieces_of(digest, cached.files))
        self._node.on_disk[digest] = cached
        self._node.disk_used_ms[digest] = self._clock.now_ms()
        took_ms = self._clock.monotonic_ms() - leg.began_ms
        if not lane.was_paced:
            self._node.rates = self._node.rates.learned(Way.TO_DISK, leg.total, took_ms)
        leg.done = leg.total
        self._found(digest)

    async def _to_host(self, staging: Staging, lane: TrafficLane, weights: Weights) -> None:
        digest = weights.digest
        pieces = self._host_pieces(weights)
        if not pieces or self.is_in_host(weights):
            return
        # Another one may be filling a range that both want: it counts as there only once it is whole.
        staging.keys = frozenset(piece.key for piece in pieces)
        await self._stagings.yield_to(staging)
        settled = self._node.host.settle(digest, pieces, self._unused_in_host())
        if not isinstance(settled, Settled):
            return
        self._leavers.leave_host(settled.evicted, digest)
        await self._record_without(settled.evicted)
        missing = [piece for piece in pieces if piece.key not in self._node.host.ranges]  # also what went with them
        again = self._node.host.settle(digest, pieces, [])
        if not isinstance(again, Settled):
            return
        self._node.host = again.arena
        leg = staging.legs[Way.TO_HOST]
        leg.total, leg.began_ms = sum(piece.size for piece in missing), self._clock.monotonic_ms()

        def on_bytes(done: int) -> None:
            leg.done = min(done, leg.total)
            self._node.progress.notify()

        try:
            await self._arena.fill(self._fillings(weights, missing), lane, on_bytes)
        except BaseException:
            self._node.host = self._node.host.release(digest)
            raise
        self._node.host = self._node.host.commit(digest)
        self._node.host_used_ms[digest] = self._clock.now_ms()
        took_ms = self._clock.monotonic_ms() - leg.began_ms
        if not lane.was_paced:
            self._node.rates = self._node.rates.learned(Way.TO_HOST, leg.total, took_ms)
        leg.done = leg.total
        await self._record()
        self._node.tell()

    def _host_pieces(self, weights: Weights) -> list[Piece]:
        cached = self._node.on_disk.get(weights.digest)
        if cached is None or self._arena.capacity == 0:
            return []
        mapped = {file.sha256: file.size for file in cached.files if file.name in weights.mapped(cached.files)}
        return [Piece(key, size) for key, size in mapped.items()]

    def _fillings(self, weights: Weights, missing: Sequence[Piece]) -> list[Filling]:
        cached = self._node.on_disk[weights.digest]
        paths = {file.sha256: _file_path(cached, file) for file in cached.files}
        return [Filling(paths[each.key], each.size, self._node.host.ranges[each.key].offset) for each in missing]

    def _unused_in_host(self) -> list[Digest]:
        in_use = self._node.digests_in_use()
        return sorted(
            (
                each
                for each in self._node.host.ledger.contents
                if each not in in_use and self._stagings.find(each) is None
            ),
            key=lambda each: self._node.host_used_ms.get(each, 0),
        )

    async def _record_without(self, evicted: Sequence[Digest]) -> None:
        """Ranges are written over only once the index does not name them any more."""
        if not evicted:
            return
        self._node.host = self._node.host.release(*evicted)
        await self._record()

    async def _record(self) -> None:
        """Remember what is whole now. Several may come or go at once: each write has the newest."""
        await asyncio.shield(self._record_whole())

    async def _record_whole(self) -> None:
        async with self._recording:
            host = self._node.host
            whole = [digest for digest in host.ledger.contents if host.ledger.is_whole(digest)]
            await self._arena.record([_host_version(host, digest) for digest in whole])

    async def _take_over_disk(self, found: FoundOnDisk) -> None:
        for cached in sorted(found.versions, key=lambda cached: cached.last_used_ms, reverse=True):
            pieces = pieces_of(cached.digest, cached.files)
            ledger = self._node.disk.reserve(cached.digest, pieces)
            if isinstance(ledger, NoRoom):
                await self._cache.remove(cached.digest)
                await self._drop_unheld([piece.key for piece in pieces])
                continue
            self._node.disk = ledger.commit(cached.digest, pieces)
            self._node.on_disk[cached.digest] = cached
            self._node.disk_used_ms[cached.digest] = cached.last_used_ms
        for part in found.interrupted:
            name = _interrupted(part.key)
            ledger = self._node.disk.reserve(name, [Piece(name, part.size)])
            if isinstance(ledger, NoRoom):
                await self._cache.drop([part.key])
                continue
            self._node.disk = ledger.commit(name, [Piece(name, part.size)])
            self._node.disk_used_ms[name] = part.last_used_ms

    def _take_over_host(self, version: HostVersion) -> None:
        ranges = {key: Range(*where) for key, where in version.ranges.items()}
        adopted = self._node.host.adopt(version.digest, ranges)
        if adopted is not None:
            self._node.host = adopted

    async def _delete(self, digest: Digest) -> None:
        if digest.startswith(INTERRUPTED):
            await self._cache.drop([digest.removeprefix(INTERRUPTED)])
            return
        if digest in self._node.disk.contents:
            return  # it is wanted again already
        cached = self._node.on_disk.pop(digest, None)
        await self._cache.remove(digest)
        if cached is not None:
            held = self._node.disk.pieces
            await self._cache.drop([file.sha256 for file in cached.files if file.sha256 not in held])

    async def _drop_unheld(self, keys: Sequence[str]) -> None:
        async with self._removing:
            await self._cache.drop([key for key in keys if key not in self._node.disk.pieces])

    def _forget_on_disk(self, digest: Digest) -> None:
        """The version is not what it was when it was verified, or was never here."""
        if digest in self._node.disk.contents:
            self._node.disk = self._node.disk.release(digest)
            self._gone_from_disk(digest)
        self._node.on_disk.pop(digest, None)

    def _gone_from_disk(self, digest: Digest) -> None:
        self._node.disk_used_ms.pop(digest, None)
        for home in self._node.sharing(digest):
            self._steps.take(home.instance.version, words.DroppedFromDisk())

    def _found(self, digest: Digest) -> None:
        for home in self._node.sharing(digest):
            self._steps.take(home.instance.version, words.FoundOnDisk())


def _host_version(host: HostArena, digest: Digest) -> HostVersion:
    return HostVersion(
        digest, {key: (host.ranges[key].offset, host.ranges[key].size) for key in host.ledger.contents[digest]}
    )


def _request(weights: Weights) -> StageRequest:
    return StageRequest(weights.source, weights.digest, weights.files)


def _interrupted(key: str) -> Digest:
    return Digest(INTERRUPTED + key)


def _file_path(cached: CachedVersion, file: ContentFile) -> Path:
    return cached.path if cached.path.name == file.name and len(cached.files) == 1 else cached.path / file.name

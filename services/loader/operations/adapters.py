"""Adapters on this node: where an engine finds the one that a request wants, staged and checked before.

    source ──► disk cache (as any version; shared, least recently used leaves) ──► host memory ──► the engine's slots

Who asks is checked against the catalogue each time; whether the weights fit the instance, once for each pair of
contents, before any engine hears of them. What an engine was told of stays for `KEEP_MS`. Adapters of models that stand
here come in the background while there is room, so their first request waits for nothing: as many as fit, thousands or
ten. After a restart of the loader what is on disk and in host memory is taken over; after one of Triton nothing here
has changed, and engines fill their slots again from host memory. Decision: docs/decisions/0125-adapters.md.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from roundhouse.catalogue.records import Adapter
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, InvalidInput, NotFound, RoundhouseError, Unavailable
from roundhouse.vocabulary import AdapterName, Digest, TenantId
from services.loader.adapter_ports import AdapterShelf
from services.loader.domain.instance import State
from services.loader.domain.memory_ledger import MemoryLedger, NoRoom
from services.loader.domain.staging_priority import Priority
from services.loader.operations.berthing import Berthing
from services.loader.operations.caches import CacheTiers
from services.loader.operations.leavers import Leavers
from services.loader.operations.node import Misfit, Node, Residence, Weights, weights_of
from services.loader.ports import AuditNote, AuditTrail, ModelLibrary

log = structlog.get_logger(__name__)

KEEP_MS = 10_000  # an engine reads an adapter when the request comes to it, within a second; the rest is margin
ROOM_POLL_MS = 250  # how often one that found no room looks again: others are kept for seconds only
BACKGROUND_FREE_SHARE = 0.1  # of the disk that background staging leaves free: models come suddenly. A guess.
RETRY_MS = 60_000  # before a source that failed is asked again in the background
MISFITS_MAX = 10_000  # remembered; the oldest go
_SERVING = (State.READY, State.DRAINING)


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """EnsureAdapter."""

    adapter: AdapterName
    digest: Digest
    tenant_id: TenantId
    triton_name: str  # the instance that is to use it
    deadline_ms: int = 0  # from now; 0 = none
    use_ms: int = 0  # from now: how long the requests that it is asked for may still run


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Where an engine finds it."""

    path: Path
    in_host: bool
    engine_name: str = ""  # what a request has to call it; empty = by its path


class Adapters:
    """See the module. `turn` runs each second."""

    def __init__(
        self,
        node: Node,
        caches: CacheTiers,
        library: ModelLibrary,
        shelf: AdapterShelf,
        leavers: Leavers,
        audit: AuditTrail,
        clock: Clock,
        berthing: Berthing,
    ) -> None:
        self._node = node
        self._berthing = berthing
        self._stock = node.adapters
        self._caches = caches
        self._library = library
        self._shelf = shelf
        self._leavers = leavers
        self._audit = audit
        self._clock = clock
        self._fits: set[tuple[Digest, Digest, int]] = set()
        self._busy: dict[Digest, asyncio.Lock] = {}
        self._callers: Counter[Digest] = Counter()
        self._shelving = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._retry_ms: dict[Digest, int] = {}
        self._seen: Mapping[AdapterName, Adapter] | None = None

    async def start(self, host_bytes: int) -> None:
        """Take over what an earlier process left in host memory; what does not fit any more is deleted."""
        self._stock.host = MemoryLedger(host_bytes)
        for digest, size in (await self._shelf.start()).items():
            ledger = self._stock.host.reserve(digest, size)
            if isinstance(ledger, NoRoom):
                await self._shelf.remove(digest)
                continue
            self._stock.host = ledger.commit(digest)
            self._stock.shelved.add(digest)

    async def ensure(self, order: AdapterOrder) -> AdapterPlace:
        """Have an adapter here for an instance; where it lies. Idempotent; cancelling leaves nothing half-done.

        Raises NotFound (the catalogue has no such adapter for this tenant, or the node no such instance), InvalidInput
        (it does not fit, and why), CapacityExhausted (no room before the deadline), Unavailable (source, disk)."""
        adapter = self._library.adapter(order.adapter, order.tenant_id)
        if adapter.digest != order.digest:
            raise NotFound(f"the catalogue has another version of {order.adapter}")
        home = self._home(order.triton_name)
        self._check_base(adapter, home)
        until_ms = self._clock.monotonic_ms() + order.deadline_ms if order.deadline_ms else None
        while True:
            try:
                self._caches.promote(adapter.digest, Priority.DEMAND)  # it may be under way in the background
                async with self._alone(adapter.digest):
                    return await self._berthed(order, home, await self._bring(adapter, home, Priority.DEMAND))
            except CapacityExhausted:
                if until_ms is None or self._clock.monotonic_ms() >= until_ms:
                    raise
            await self._clock.sleep_ms(ROOM_POLL_MS)
            self._let_go()

    async def turn(self) -> None:
        """Let go of what is not promised any more, follow the catalogue, and stage in the background."""
        self._let_go()
        self._berthing.turn()
        if not self._library.is_known:
            return
        if self._library.adapters() is not self._seen:
            await self._follow_catalogue()
        if self._background is None or self._background.done():
            self._background = asyncio.create_task(self._stage_ahead(), name="adapters ahead")

    async def stop(self) -> None:
        """End what goes on in the background. Idempotent."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)

    def _home(self, triton_name: str) -> Residence:
        for home in self._node.residences.values():
            if home.triton_name == triton_name and home.instance.state in _SERVING:
                return home
        raise NotFound("the node does not have that instance any more")

    async def _berthed(self, order: AdapterOrder, home: Residence, place: AdapterPlace) -> AdapterPlace:
        """The place, by the name under which the instance knows it if that is not its path."""
        name = await self._berthing.moor(home, order.digest, place.path)
        if name:
            self._berthing.promise(order.digest, KEEP_MS + order.use_ms)
        return replace(place, engine_name=name)

    def _pair(self, adapter: Adapter, home: Residence) -> tuple[Digest, Digest, int]:
        """What decides whether it fits. Raises Unavailable: the instance takes no adapters."""
        berths = self._berthing.of(home)
        return adapter.digest, home.instance.version.digest, berths.rank_max if berths else 0

    def _check_base(self, adapter: Adapter, home: Residence) -> None:
        version = home.instance.version
        known = self._stock.misfits.get(self._pair(adapter, home))
        if known is not None:
            raise InvalidInput(known.reason, code="adapter_invalid", param="adapter")
        if adapter.base != version.model:
            raise InvalidInput(f"its base is {adapter.base}", code="adapter_invalid", param="adapter")
        if adapter.base_digest not in (None, version.digest):
            reason = f"made for another version of {adapter.base}: {adapter.base_digest}"
            raise InvalidInput(reason, code="adapter_invalid", param="adapter")

    async def _bring(self, adapter: Adapter, home: Residence, priority: Priority) -> AdapterPlace:
        """Stage, check, shelve; whatever of that is done already is not done again."""
        digest = adapter.digest
        in_host = digest in self._stock.shelved
        if in_host:
            self._keep(digest)
            path = self._shelf.path(digest)
        else:
            weights = Weights(digest, adapter.source_path, adapter.files)
            await self._caches.stage(weights, priority, to_host=False)
            self._keep(digest)
            path = await self._caches.path(digest)
        await self._check_fit(adapter, home, path)
        if not in_host and await self._shelve(digest, path, evicting=priority is Priority.DEMAND):
            in_host, path = True, self._shelf.path(digest)
        return AdapterPlace(path, in_host)

    async def _check_fit(self, adapter: Adapter, home: Residence, path: Path) -> None:
        base, pair = home.instance.version, self._pair(adapter, home)
        if pair in self._fits:
            return
        if base.digest not in self._node.on_disk:  # Triton had it when this process began, and the cache was lost
            await self._caches.stage(weights_of(home.model, self._library), Priority.DEMAND, to_host=False)
        base_path = await self._caches.path(base.digest)
        try:
            model = msgspec.structs.replace(home.model, adapter_rank_max=pair[2] or home.model.adapter_rank_max)
            await self._library.check_adapter(path, model, base_path)
        except InvalidInput as error:
            self._refuse(pair, Misfit(adapter.name, base, error.message))
            raise
        self._fits.add(pair)

    def _refuse(self, pair: tuple[Digest, Digest, int], misfit: Misfit) -> None:
        """It is told to operators once, and to every caller."""
        misfits = self._stock.misfits
        if pair in misfits:
            return
        misfits[pair] = misfit
        if len(misfits) > MISFITS_MAX:
            del misfits[next(iter(misfits))]
        log.warning("adapter_refused", adapter=misfit.adapter, base=misfit.base.model, reason=misfit.reason)
        self._audit.record(AuditNote("adapter-refused", misfit.base, misfit.reason, {"adapter": misfit.adapter}))
        self._node.tell()

    async def _shelve(self, digest: Digest, source: Path, *, evicting: bool) -> bool:
        """Copy it to host memory if there is room, or room can be made; whether it is there."""
        cached = self._node.on_disk.get(digest)
        if cached is None or cached.size > self._stock.host.capacity:
            return False
        async with self._shelving:
            if digest in self._stock.shelved:
                return True
            if not await self._make_room(cached.size, digest, evicting=evicting):
                return False
            ledger = self._stock.host.reserve(digest, cached.size)
            assert not isinstance(ledger, NoRoom), "room was made"
            self._stock.host = ledger
            try:
                await _whole(self._shelf.put(digest, source))
            except BaseException as error:
                await _whole(self._off_the_shelf(digest))
                if isinstance(error, Unavailable):
                    log.warning("adapter_not_shelved", reason=error.message)
                    return False  # it is used from disk
                raise
            self._stock.host = self._stock.host.commit(digest)
            self._stock.shelved.add(digest)
            return True

    async def _make_room(self, size: int, heir: Digest, *, evicting: bool) -> bool:
        """Least recently used first; what an engine was just told of stays."""
        stays: set[Digest] = set()
        while self._stock.host.free < size:
            if not evicting:
                return False
            unused = [each for each in self._stock.shelved - stays if self._may_unshelve(each)]
            if not unused:
                return False
            oldest = min(unused, key=lambda each: (self._stock.used_ms.get(each, 0), each))
            if not await self._unshelve(oldest, heir):
                stays.add(oldest)
        return True

    def _may_unshelve(self, digest: Digest) -> bool:
        """Nobody was just told of its place, and who finds it by a link finds it on disk."""
        if digest in self._stock.kept_until_ms:
            return False
        return digest not in self._stock.promised_until_ms or digest in self._node.on_disk

    async def _unshelve(self, digest: Digest, heir: Digest | None = None) -> bool:
        """Whether it has left; it stays if somebody was promised it by a link that cannot lead to the disk now."""
        self._stock.shelved.discard(digest)
        try:
            if digest in self._node.on_disk:
                await self._berthing.follow(digest, await self._caches.path(digest))
        except RoundhouseError as error:
            log.warning("adapter_not_on_disk", reason=error.message)
            if digest in self._stock.promised_until_ms:
                self._stock.shelved.add(digest)
                return False
        except BaseException:
            self._stock.shelved.add(digest)
            raise
        if heir is not None:
            adapters = self._library.adapters().values()
            name = next((each.name for each in adapters if each.digest == digest), None)
            self._leavers.leave_shelf(name, digest, heir)
        await _whole(self._off_the_shelf(digest))
        return True

    async def _off_the_shelf(self, digest: Digest) -> None:
        await self._shelf.remove(digest)
        self._stock.host = self._stock.host.release(digest)

    def _keep(self, digest: Digest) -> None:
        now_ms = self._clock.now_ms()
        self._stock.used_ms[digest] = now_ms
        self._stock.kept_until_ms[digest] = now_ms + KEEP_MS

    def _let_go(self) -> None:
        now_ms = self._clock.now_ms()
        for promises in (self._stock.kept_until_ms, self._stock.promised_until_ms):
            for digest in [each for each, until_ms in promises.items() if until_ms <= now_ms]:
                del promises[digest]

    async def _follow_catalogue(self) -> None:
        """What the catalogue does not name any more leaves host memory at once; the disk forgets it in its own time."""
        adapters = self._library.adapters()
        self._stock.declared = frozenset(adapter.digest for adapter in adapters.values())
        self._fits = {pair for pair in self._fits if pair[0] in self._stock.declared}
        for pair in [pair for pair in self._stock.misfits if pair[0] not in self._stock.declared]:
            del self._stock.misfits[pair]
        async with self._shelving:
            gone = self._stock.shelved - self._stock.declared
            left = [await self._unshelve(digest) for digest in gone if self._may_unshelve(digest)]
        for digest in self._stock.used_ms.keys() - self._stock.declared:
            del self._stock.used_ms[digest]
        self._seen = adapters if all(left) else None  # else it is looked at again

    async def _stage_ahead(self) -> None:
        """One after the other, while there is room without sending anybody away."""
        passed: set[Digest] = set()
        while self._node.accepting:
            found = self._next_ahead(passed)
            if found is None:
                return
            adapter, home = found
            passed.add(adapter.digest)
            try:
                self._check_base(adapter, home)
                async with self._alone(adapter.digest):
                    await self._bring(adapter, home, Priority.BACKGROUND)
            except RoundhouseError as error:
                self._retry_ms[adapter.digest] = self._clock.now_ms() + RETRY_MS
                log.info("adapter_not_staged", adapter=adapter.name, reason=error.message)
            finally:
                self._stock.kept_until_ms.pop(adapter.digest, None)  # nobody was told of it

    def _next_ahead(self, passed: set[Digest]) -> tuple[Adapter, Residence] | None:
        ready = {
            home.instance.version.model: home
            for home in self._node.residences.values()
            if home.instance.state is State.READY and not home.succeeded_by
        }
        room = self._node.disk.free - BACKGROUND_FREE_SHARE * self._node.disk.capacity
        now_ms = self._clock.now_ms()
        for adapter in self._library.adapters().values():
            home, digest = ready.get(adapter.base), adapter.digest
            if home is None or digest in passed or digest in self._node.on_disk or digest in self._stock.shelved:
                continue
            if not self._berthing.takes(home):
                continue
            if self._pair(adapter, home) in self._stock.misfits:
                continue
            if self._retry_ms.get(digest, 0) <= now_ms and sum(file.size for file in adapter.files) <= room:
                return adapter, home
        return None

    @asynccontextmanager
    async def _alone(self, digest: Digest) -> AsyncIterator[None]:
        """One at a time for each adapter: who comes later finds what the first one did (invariant 7)."""
        lock = self._busy.setdefault(digest, asyncio.Lock())
        self._callers[digest] += 1
        try:
            async with lock:
                yield
        finally:
            self._callers[digest] -= 1
            if not self._callers[digest]:
                del self._busy[digest], self._callers[digest]


async def _whole(work: Coroutine[None, None, None]) -> None:
    """Do it to its end. Cancelled: first it ends, so that nobody meets half of it, and then this does."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise

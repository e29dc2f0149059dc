"""Keeps what the loader believes equal to what Triton has: is it alive, and what does its index list.

Once a second: a probe, then the index. A hung server is told from a dead one only by its silence, so one slow answer is
asked again before the node takes itself out of service; silence is noticed within 3 s of the hang. What the index no
longer has is marked as not loaded and its bytes are released; what it has and nobody knows is adopted if the catalogue
names it and it fits, else unloaded. What was lost with a Triton that was restarted is loaded again.
"""

from collections.abc import Mapping, Sequence

import structlog

from roundhouse.catalogue.records import Model
from roundhouse.clock import Clock
from roundhouse.errors import EngineFailed, NotFound, RoundhouseError
from services.loader.domain import instance as words
from services.loader.domain.device_ledger import Site
from services.loader.domain.instance import State
from services.loader.domain.memory_ledger import NoRoom
from services.loader.domain.sites import Need, Placed, place
from services.loader.domain.versions import ModelVersion
from services.loader.operations.maintenance import Recollection
from services.loader.operations.node import Node, Residence
from services.loader.operations.steps import Steps
from services.loader.ports import AuditNote, AuditTrail, Measurements, ModelControl, ModelLibrary, TritonState

log = structlog.get_logger(__name__)

TURN_MS = 1_000
# Worst case until a hang is known: just missed a turn 1,000 + first answer 1,000 + second 500 = 2.5 s, under 3 s.
PROBE_TIMEOUT_MS = 1_000
SECOND_PROBE_TIMEOUT_MS = 500
UNLOAD_TIMEOUT_MS = 1_000
LOST_MAX = 3  # so often within the window a version comes back by itself; then it waits for an order. A guess.
LOST_WINDOW_MS = 300_000
RECONCILE = "reconcile"
"""The reason of a load that nobody ordered: Triton came back without what it had."""


class TritonWatch:
    """Runs `turn` once a second, and once before the loader serves."""

    def __init__(
        self,
        node: Node,
        steps: Steps,
        control: ModelControl,
        library: ModelLibrary,
        audit: AuditTrail,
        measurements: Measurements,
        recollection: Recollection,
        clock: Clock,
    ) -> None:
        self._node = node
        self._steps = steps
        self._control = control
        self._library = library
        self._audit = audit
        self._measurements = measurements
        self._recollection = recollection
        self._clock = clock

    async def turn(self) -> None:
        """Probe, compare, repair. Raises nothing that is expected."""
        await self._settle_catalogue()
        before = {version: home.instance.steps for version, home in self._node.residences.items()}
        try:
            index = await self._ask()
        except RoundhouseError as error:
            self._node.set_health(error.message)
            return
        self._node.dead &= index.keys()
        await self._recollect()
        self._drop_lost(index, before)
        if self._library.is_known:
            await self._take_in_unknown(index, before)
        elif not all(state is TritonState.UNAVAILABLE for state in index.values()):
            # Without a catalogue a name proves nothing, and what Triton holds is in no ledger.
            self._node.set_health("Triton holds models and the catalogue was not read yet")
            return
        self._node.set_health("")

    async def _ask(self) -> Mapping[str, TritonState]:
        try:
            await self._control.probe(timeout_ms=PROBE_TIMEOUT_MS)
            return await self._control.index(timeout_ms=PROBE_TIMEOUT_MS)
        except RoundhouseError:
            await self._control.probe(timeout_ms=SECOND_PROBE_TIMEOUT_MS)
            return await self._control.index(timeout_ms=SECOND_PROBE_TIMEOUT_MS)

    def _drop_lost(self, index: Mapping[str, TritonState], before: Mapping[ModelVersion, int]) -> None:
        """What was loaded before the index was asked and is not in it is gone, for example by a restart of Triton."""
        for version, home in list(self._node.residences.items()):
            unchanged = before.get(version) == home.instance.steps
            loaded = home.instance.state in (State.READY, State.DRAINING)
            if unchanged and loaded and index.get(home.triton_name) is not TritonState.READY:
                log.warning("instance_lost", model=version.model, digest=version.digest)
                was = home.instance
                self._steps.take(version, words.Lost())
                self._measurements.unloaded("lost")
                self._audit.record(AuditNote("lost", version, "Triton does not have it any more"))
                self._load_again(home, wanted=was.wanted)

    def _load_again(self, home: Residence, *, wanted: bool) -> None:
        """What was wanted comes back by itself, beside nobody's loss; what takes Triton down with it does not."""
        now_ms = self._clock.now_ms()
        home.lost_ms = (*(each for each in home.lost_ms if now_ms - each < LOST_WINDOW_MS), now_ms)
        if not wanted or self._node.maintenance or self._node.draining or len(home.lost_ms) > LOST_MAX:
            return
        home.unload_first, home.reason, home.wanted_site = (), RECONCILE, home.site
        self._steps.take(home.instance.version, words.LoadCommanded(home.instance.generation))

    async def _recollect(self) -> None:
        try:
            await self._recollection.keep()
        except RoundhouseError as error:
            log.warning("not_remembered", reason=error.message)

    async def _take_in_unknown(self, index: Mapping[str, TritonState], before: Mapping[ModelVersion, int]) -> None:
        known = self._library.versions()
        named = {version.model for version in known.values()}
        replaced = {name: each for name, each in self._node.loaded_before.items() if each.name in named}
        ours = {home.triton_name: home for home in self._node.residences.values()}
        for name, state in index.items():
            home = ours.get(name)
            if state not in (TritonState.READY, TritonState.UNLOADING) or _is_busy(home, before):
                continue
            if name in self._node.dead:
                continue  # what still stands under this name has no process
            version = known.get(name)
            if version is None and (old := replaced.get(name)) is not None:
                version = ModelVersion(old.name, old.digest)  # it serves until its new version takes over
            if home is not None and home.instance.state is State.FAILED:
                version = None  # a load that we gave up and that came through later
            if version is None or not await self._adopt(version, state, replaced.get(name)):
                await self._unload_unknown(name)
        self._node.loaded_before = {}

    async def _adopt(self, version: ModelVersion, state: TritonState, before: Model | None) -> bool:
        """Take what Triton has as ours; `before` is its record as an earlier process knew it."""
        try:
            home = self._node.settle_in(version, self._record(version, before))
            size = self._node.size_measured(home) or await self._library.device_bytes(home.model)
            placed = await self._control.placed_on(home.triton_name, timeout_ms=PROBE_TIMEOUT_MS)
        except RoundhouseError:
            return False
        if not home.instance.state.is_at_rest:
            return True  # an order came meanwhile
        site = self._site_of(placed.uuids)
        if site is None or not self._take_place(home, size, site):
            return False
        home.alone_for = placed.alone_for
        log.info("instance_adopted", model=version.model, digest=version.digest, devices=home.site)
        self._steps.take(version, words.Adopted() if state is TritonState.READY else words.FoundLeaving())
        return True

    def _record(self, version: ModelVersion, before: Model | None) -> Model:
        try:
            return self._library.find(version)
        except NotFound:
            if before is None:
                raise
            return before

    def _site_of(self, uuids: Sequence[str]) -> Site | None:
        """Where a model stands by its package; empty = it does not say, None = on devices that are not here now."""
        known = {device.uuid: device.index for device in self._node.device.devices}
        if not all(uuid in known for uuid in uuids):
            return None
        return tuple(sorted(known[uuid] for uuid in uuids))

    def _take_place(self, home: Residence, size: int, site: Site) -> bool:
        """Note in the account what stands there already; False if it has no room for it."""
        version = home.instance.version
        if not site:
            placed = place(self._node.device, Need.of(version, size, home.count), ())
            site = placed.site if isinstance(placed, Placed) else ()
        ledger = self._node.device.reserve(version, site, Need.of(version, size, len(site)).share) if site else None
        if ledger is None or isinstance(ledger, NoRoom):
            return False
        home.device_bytes, home.site = size, site
        self._node.device = ledger.commit(version)
        return True

    async def _unload_unknown(self, name: str) -> None:
        log.warning("unknown_model_unloaded", triton_model=name)
        self._measurements.unloaded("unknown")
        try:
            await self._control.unload(name, timeout_ms=UNLOAD_TIMEOUT_MS)
        except (RoundhouseError, EngineFailed) as error:
            log.warning("unknown_model_stays", triton_model=name, reason=error.message)

    async def _settle_catalogue(self) -> None:
        """Show versions whose weights are on disk already; forget those that the catalogue dropped."""
        if not self._library.is_known:
            return
        current = frozenset(self._library.versions().values())
        for version in current - self._node.residences.keys():
            if self._node.disk.held_by(version.digest).resident:
                self._show_on_disk(version)
        self._node.measured = {key: size for key, size in self._node.measured.items() if key[0] in current}
        for version in self._node.residences.keys() - current:
            home = self._node.residences[version]
            if home.instance.state.is_at_rest and home.succeeded_by is None:
                del self._node.residences[version]
                self._node.tell()

    def _show_on_disk(self, version: ModelVersion) -> None:
        try:
            self._node.settle_in(version, self._library.find(version))
        except NotFound:
            return  # the catalogue changed between the two looks
        self._steps.take(version, words.FoundOnDisk())


def _is_busy(home: Residence | None, before: Mapping[ModelVersion, int]) -> bool:
    """Whether the index says nothing about this residence: it moves, or it moved since the index was asked."""
    if home is None:
        return False
    return not home.instance.state.is_at_rest or before.get(home.instance.version) != home.instance.steps

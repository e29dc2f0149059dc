"""Does what the life of a version commands: decide on room, stage weights, load, drain, unload.

Each command ends in exactly one event, whatever happens: an error becomes the event that says why, so no version hangs
between two states. Cancellation (only at the end of the process) leaves Triton as it is; the next process adopts it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from roundhouse.catalogue.records import Engine, Model
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, DeadlinePassed, NotFound, RoundhouseError, Unavailable
from services.loader.device_ports import DeviceInventory, ModelProcesses, Setting
from services.loader.domain import instance as words
from services.loader.domain.instance import Command, State
from services.loader.domain.memory_ledger import NoRoom
from services.loader.domain.rates import Way
from services.loader.domain.sites import Need
from services.loader.domain.staging_priority import Priority
from services.loader.domain.versions import ModelVersion
from services.loader.operations.admission import choose_place
from services.loader.operations.berthing import Berthing
from services.loader.operations.caches import CacheTiers
from services.loader.operations.node import Node, Residence, weights_of
from services.loader.operations.steps import Steps
from services.loader.ports import AuditNote, AuditTrail, Measurements, ModelControl, ModelLibrary, TritonState

log = structlog.get_logger(__name__)

CONTROL_TIMEOUT_MS = 2_000  # index and unload answer in milliseconds; this only bounds a hung server
FIRST_POLL_MS = 5
LONGEST_POLL_MS = 100  # how late freed memory may be seen
DEAD_UNLOAD_MS = 1_000  # Triton confirms at once, or never: its requests to a dead process do not end (tried)
REPEAT_UNLOAD_MS = 5_000  # Triton forgets an unload that it got while it was restarted
# A grant that is on its way reaches Triton in tens of milliseconds; ten times that (a guess).
DRAIN_MS = 250
# Whoever evicts has seen that no request runs there, so what Triton still waits for will never come: it can lose the
# end of a stream (docs/decisions/0168; one unload in ten on a busy machine). Confirmed unloads take under a second.
EVICTED_PATIENCE_MS = 5_000
FREED_MS = 10_000  # a driver frees 100 GB in about a second; ten times that (a guess)
UNFREED_NOISE_BYTES = 256 * 2**20  # contexts and pools that libraries make once and keep. A guess.
FAILED_LOAD = "failed"


@dataclass(frozen=True, slots=True)
class Parts:
    """What performing needs of the world."""

    control: ModelControl
    library: ModelLibrary
    audit: AuditTrail
    measurements: Measurements
    processes: ModelProcesses
    inventory: DeviceInventory
    clock: Clock
    load_timeout_ms: int
    unload_patience_ms: int = 300_000  # how long running requests may hold up an unload that was ordered


class Performer:
    """One of these a node. Its methods run as tasks, many versions at once, one command a version."""

    def __init__(self, node: Node, steps: Steps, caches: CacheTiers, parts: Parts, berthing: Berthing) -> None:
        self._node = node
        self._steps = steps
        self._caches = caches
        self._parts = parts
        self._berthing = berthing

    async def perform(self, version: ModelVersion, command: Command) -> None:
        """Do `command`; takes the event it ends in."""
        home = self._node.residences[version]
        match command:
            case Command.ADMIT:
                await self._admit(home)
            case Command.STAGE:
                await self._stage(home)
            case Command.LOAD:
                await self._load(home)
            case Command.DRAIN:
                await self._drain(home)
            case Command.UNLOAD:
                await self._unload(home)

    async def _admit(self, home: Residence) -> None:
        version = home.instance.version
        try:
            home.model = self._model_of(home)
            home.device_bytes = self._node.size_measured(home) or await self._parts.library.device_bytes(home.model)
            files = await self._caches.look(weights_of(home.model, self._parts.library))
            home.weights_bytes = sum(file.size for file in files)
            self._caches.check_disk(version.digest, files)
            placed = choose_place(self._node, home)
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers are told and the life goes on
            home.refusal, home.refused_attempt = _as_error(error), home.instance.attempt
            self._parts.measurements.load_ended(version.model, "refused")
            self._steps.take(version, words.NotAdmitted())
            return
        self._steps.promise(home, placed)
        self._steps.take(version, words.Admitted())

    def _model_of(self, home: Residence) -> Model:
        """The catalogue's record; of a version that it replaced and that has to come back, the last one. NotFound."""
        try:
            return self._parts.library.find(home.instance.version)
        except NotFound:
            if home.succeeded_by is None:
                raise
            return home.model

    async def _stage(self, home: Residence) -> None:
        version, began_ms = home.instance.version, self._parts.clock.monotonic_ms()
        try:
            await self._staged_or_given_up(home)
        except Exception as error:  # noqa: BLE001 - a version must not stay in STAGING
            self._failed(home, words.StageFailed(_as_error(error).message))
            return
        if not home.instance.wanted:
            self._steps.take(version, words.StageFailed("a newer order unloads it"))
            return
        took_ms = self._parts.clock.monotonic_ms() - began_ms
        self._parts.measurements.phase_took("stage", took_ms)
        self._steps.take(version, words.Staged(took_ms))

    async def _staged_or_given_up(self, home: Residence) -> None:
        """Until it is staged, or nobody wants it: an unload order cancels `home.staging`."""
        while home.instance.wanted:
            priority = Priority.of_reason(home.reason)
            home.staging = asyncio.ensure_future(
                self._caches.stage(weights_of(home.model, self._parts.library), priority)
            )
            try:
                await home.staging
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # the process ends
                continue  # given up by an order; a newer one may want it again
            finally:
                home.staging = None
            return

    async def _load(self, home: Residence) -> None:
        version = home.instance.version
        timeout_ms = self._parts.load_timeout_ms
        try:
            await self._make_room(home, timeout_ms)
            if home.triton_name in self._node.dead:
                # Triton would call the dead one loaded and do nothing.
                await self._parts.control.unload(home.triton_name, timeout_ms=CONTROL_TIMEOUT_MS)
            weights = await self._caches.path(version.digest)
            view = self._caches.view(version.digest)
            berths = await self._berthing.prepare(home)
            setting = Setting(self._node.devices_of(home), home.alone_for, berths)
            package = await self._parts.library.package(home.model, weights, view, setting)
            began_ms = self._parts.clock.monotonic_ms()
            await self._parts.control.load(home.triton_name, package, timeout_ms=timeout_ms)
            await self._wait_for(home.triton_name, frozenset({TritonState.READY}), timeout_ms)
        except Exception as error:  # noqa: BLE001 - a version must not stay in LOADING
            self._failed(home, words.LoadFailed(_as_error(error).message))
            return
        took_ms = self._parts.clock.monotonic_ms() - began_ms
        self._node.dead.discard(home.triton_name)
        self._node.rates = self._node.rates.learned(Way.TO_DEVICE, home.weights_bytes, took_ms)
        self._parts.measurements.phase_took("load", took_ms)
        self._parts.measurements.load_ended(version.model, "ready")
        self._steps.take(version, words.Loaded(took_ms))
        details = {"load_ms": str(took_ms), "tier": "host" if self._caches.view(version.digest) else "disk"}
        self._parts.audit.record(AuditNote("load", version, home.reason, details))
        await self._measure(home)

    async def _measure(self, home: Residence) -> None:
        """What the model's processes really took. It replaces an estimate; what the catalogue says stays."""
        version = home.instance.version
        pids = await self._parts.processes.find(home.triton_name)
        home.had_process = bool(pids)
        home.measured_bytes = await self._size_of(home, pids) if pids else 0
        if not home.measured_bytes or home.model.device_bytes or home.instance.state is not State.READY:
            return
        self._node.measured[(version, len(home.site))] = home.measured_bytes
        ledger = self._node.device.resize(version, Need.of(version, home.measured_bytes, len(home.site)).share)
        if isinstance(ledger, NoRoom):
            log.warning("larger_than_estimated", model=version.model, missing=ledger.missing)
            details = {"measured": str(home.measured_bytes), "estimated": str(home.device_bytes)}
            self._parts.audit.record(AuditNote("over-budget", version, "it takes more than there is", details))
            return
        self._node.device, home.device_bytes = ledger, home.measured_bytes
        self._node.tell()

    async def _size_of(self, home: Residence, pids: Sequence[int]) -> int:
        """Bytes of a model's processes on all of its devices, as much on each as on the fullest; 0 = cannot be told."""
        if not any(device.visible_as for device in self._node.devices_of(home)):
            return await self._parts.processes.memory_bytes(pids)
        held = await self._parts.inventory.held_by(await self._parts.processes.family(pids))
        return len(home.site) * max((held.get(index, 0) for index in home.site), default=0)

    def _failed(self, home: Residence, event: words.StageFailed | words.LoadFailed) -> None:
        version = home.instance.version
        log.warning("load_failed", model=version.model, digest=version.digest, reason=event.reason)
        self._parts.measurements.load_ended(version.model, "failed")
        self._steps.take(version, event)
        self._parts.audit.record(AuditNote("load-failed", version, event.reason))

    async def _make_room(self, home: Residence, timeout_ms: int) -> None:
        """Unload whose bytes were promised, and wait until all of `home`'s bytes are reserved."""
        version = home.instance.version
        self._unload_promised(version)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while (missing := self._node.device.missing(version, home.site, home.need.share)) > 0:
                    changed = self._node.changes.next()
                    if not self._node.promised_to(version) and not self._claim_more(home):
                        raise CapacityExhausted(f"{missing} bytes of device were promised and did not come free")
                    await changed.wait()
        except TimeoutError as error:
            raise DeadlinePassed(f"what had to leave first was not gone within {timeout_ms} ms") from error

    def _unload_promised(self, heir: ModelVersion) -> None:
        for victim in self._node.promised_to(heir):
            self._steps.take(victim.instance.version, words.DrainElapsed(victim.instance.steps))

    def _claim_more(self, home: Residence) -> bool:
        """Take others that a later caller allowed to leave, in place of those that came into use again."""
        try:
            placed = choose_place(self._node, home)
        except CapacityExhausted:
            return False
        self._steps.promise(home, placed)
        self._unload_promised(home.instance.version)
        return True

    async def _drain(self, home: Residence) -> None:
        steps = home.instance.steps
        await self._parts.clock.sleep_ms(DRAIN_MS)
        self._steps.take(home.instance.version, words.DrainElapsed(steps))

    async def _unload(self, home: Residence) -> None:
        """Until Triton's index says so: nothing else proves that the memory is free, but that its process died."""
        version = home.instance.version
        why = _why_unloaded(home)
        gone = frozenset({TritonState.UNAVAILABLE})
        began_ms = self._parts.clock.monotonic_ms()
        while True:
            try:
                await self._parts.control.unload(home.triton_name, timeout_ms=CONTROL_TIMEOUT_MS)
                is_dead = home.triton_name in self._node.dead
                await self._wait_for(home.triton_name, gone, DEAD_UNLOAD_MS if is_dead else REPEAT_UNLOAD_MS)
                break
            except (Unavailable, DeadlinePassed):
                log.info("unload_not_confirmed", model=version.model, digest=version.digest)
                waited_ms = self._parts.clock.monotonic_ms() - began_ms
                if home.triton_name in self._node.dead or await self._has_no_process(home):
                    break
                if await self._ended_by_force(home, waited_ms):
                    continue  # Triton may confirm now
                await self._parts.clock.sleep_ms(LONGEST_POLL_MS)
            except Exception as error:  # noqa: BLE001 - bytes stay held until Triton says otherwise; ask again
                log.error("unload_failed", model=version.model, error=type(error).__name__, text=str(error))
                await self._parts.clock.sleep_ms(REPEAT_UNLOAD_MS)
        await self._parts.control.forget(home.triton_name)
        await self._berthing.leave(home.triton_name)
        await self._freed(home)
        made_room_for = home.promised_to
        self._steps.take(version, words.Unloaded())
        if why == FAILED_LOAD:
            return  # it was never there; the failed load is on record already
        self._parts.measurements.unloaded(why)
        details = {"order": home.reason} if made_room_for is None else {"made_room_for": str(made_room_for)}
        self._parts.audit.record(AuditNote("unload", version, why, details))

    async def _freed(self, home: Residence) -> None:
        """Wait until its GPUs show its memory as free, where that can be told; what they do not is kept from others."""
        deadline_ms = self._parts.clock.monotonic_ms() + FREED_MS
        while unfreed := await self._unfreed(home):
            if self._parts.clock.monotonic_ms() >= deadline_ms:
                break
            await self._parts.clock.sleep_ms(LONGEST_POLL_MS)
        home.unfreed = unfreed
        version = home.instance.version
        for index, size in unfreed.items():
            log.error("device_memory_not_freed", model=version.model, device=index, bytes=size)
            self._parts.measurements.not_freed(index)
            details = {"device": str(index), "bytes": str(size)}
            self._parts.audit.record(AuditNote("not-freed", version, "Triton let go of it, not its device", details))

    async def _unfreed(self, home: Residence) -> dict[int, int]:
        """Bytes on each of its devices that are in use beside the other models and what was there at first."""
        used = await self._parts.inventory.used_bytes() or {}
        own = self._node.device.held_on(home.instance.version)
        beside = {
            index: used[index] - self._node.unowned[index] - (self._node.device.models_on(index) - own[index])
            for index in own.keys() & used.keys() & self._node.unowned.keys()
        }
        return {index: size for index, size in beside.items() if size > UNFREED_NOISE_BYTES}

    async def _ended_by_force(self, home: Residence, waited_ms: int) -> bool:
        """End the process of a model that does not leave; its memory is free then, whatever Triton says."""
        is_idle = home.idle or home.promised_to is not None  # who evicts has seen that nobody runs there
        patience_ms = EVICTED_PATIENCE_MS if is_idle else self._parts.unload_patience_ms
        if waited_ms < patience_ms:
            return False
        pids = await self._parts.processes.find(home.triton_name)
        if not pids:
            return False
        version = home.instance.version
        log.warning("model_process_ended", model=version.model, waited_ms=waited_ms)
        try:
            await self._parts.processes.end(pids)
        except Unavailable as error:
            log.error("model_process_stays", model=version.model, reason=error.message)
            return False  # its bytes stay held
        self._node.dead.add(home.triton_name)
        details = {"waited_ms": str(waited_ms)}
        self._parts.audit.record(AuditNote("process-ended", version, "Triton did not let go of it", details))
        return True

    async def _has_no_process(self, home: Residence) -> bool:
        """Whether the model's process died, so that Triton waits for ever for its requests to end."""
        has_one = home.had_process or home.model.engine is not Engine.TRITON  # our own engines always do
        if home.instance.reason or not has_one or await self._parts.processes.find(home.triton_name) != []:
            return False
        self._node.dead.add(home.triton_name)
        return True

    async def _wait_for(self, name: str, wanted: frozenset[TritonState], timeout_ms: int) -> None:
        """Poll the index until the model is in a `wanted` state. Raises DeadlinePassed, Unavailable."""
        pause_ms = FIRST_POLL_MS
        deadline_ms = self._parts.clock.monotonic_ms() + timeout_ms
        while True:
            index = await self._parts.control.index(timeout_ms=CONTROL_TIMEOUT_MS)
            if index.get(name, TritonState.UNAVAILABLE) in wanted:
                return
            if self._parts.clock.monotonic_ms() >= deadline_ms:
                raise DeadlinePassed(f"Triton's index did not change within {timeout_ms} ms")
            await self._parts.clock.sleep_ms(pause_ms)
            pause_ms = min(LONGEST_POLL_MS, pause_ms * 2)


def _why_unloaded(home: Residence) -> str:
    if home.instance.reason:
        return FAILED_LOAD
    return "ordered" if home.promised_to is None else "evicted"


def _as_error(error: Exception) -> RoundhouseError:
    """What callers are told: our own errors as they are, others by their kind (a fault of ours, logged in full)."""
    if isinstance(error, RoundhouseError):
        return error
    log.error("loader_fault", exc_info=error)
    return Unavailable(f"the loader failed: {type(error).__name__}")

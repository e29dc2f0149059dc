"""A whole loader without a process: real operations over fakes, in virtual time. Run it with `run_virtual`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256

from roundhouse.catalogue.records import ContentFile, Engine, Interface, Model
from roundhouse.errors import RoundhouseError, Unavailable
from roundhouse.vocabulary import ModelName
from roundhouse.wire.v1 import loading_pb2
from services.loader.device_ports import ServerMemory
from services.loader.domain.contents import ContentLedger
from services.loader.domain.device_ledger import DeviceLedger
from services.loader.domain.devices import Device
from services.loader.domain.instance import State
from services.loader.domain.versions import ModelVersion
from services.loader.operations.adapters import Adapters
from services.loader.operations.berthing import Berthing
from services.loader.operations.caches import CacheTiers
from services.loader.operations.ensure import LoadOrder, Orders, UnloadOrder
from services.loader.operations.leaks import LeakWatch
from services.loader.operations.leavers import Leavers
from services.loader.operations.maintenance import Maintenance, Recollection
from services.loader.operations.node import Node
from services.loader.operations.perform import Parts, Performer
from services.loader.operations.prestage import Prestage, StageOrder
from services.loader.operations.progress import Progress, ProgressGauge
from services.loader.operations.staging import Stagings
from services.loader.operations.steps import Steps
from services.loader.operations.succession import Succession
from services.loader.operations.watch_triton import TritonWatch
from services.loader.ports import AuditNote, Remembered
from tests.fakes.adapter_shelf import FakeShelf
from tests.fakes.berth_board import FakeBoard
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.model_control import FakeModelControl
from tests.fakes.model_library import FakeLibrary
from tests.fakes.weight_arena import FakeWeightArena
from tests.fakes.weight_cache import FakeSource, FakeWeightCache, digest_of

LOAD_TIMEOUT_MS = 10_000
SETTLED_MS = 120_000
STALL_MS = 30_000
LEAK_BYTES = 1_000


def small_file(content: str, size: int) -> ContentFile:
    """A file of a version; the same `content` is the same file."""
    return ContentFile(name=f"{content}.safetensors", size=size, sha256=sha256(content.encode()).hexdigest())


def small_model(
    name: str, device_bytes: int = 100, version: int = 1, *, files: tuple[ContentFile, ...] = (), listed: bool = True
) -> Model:
    """A catalogue record of one file of 100 bytes, or of `files`; with `listed` the catalogue names them."""
    content = files or (small_file(f"{name}{version}", 100),)
    return Model(
        name=ModelName(name),
        source_path=f"/models/{name}",
        engine=Engine.REFERENCE,
        interface=Interface.LLM,
        digest=digest_of(content),
        files=content if listed else (),
        device_bytes=device_bytes,
    )


def version_of(model: Model) -> ModelVersion:
    """The version that a record describes."""
    return ModelVersion(model.name, model.digest)


@dataclass(slots=True)
class KeptNotes:
    """`AuditTrail` in a list."""

    notes: list[AuditNote] = field(default_factory=list)

    def record(self, note: AuditNote) -> None:
        """See `AuditTrail.record`."""
        self.notes.append(note)


@dataclass(slots=True)
class KeptMeasurements:
    """`Measurements` in lists."""

    loads: list[tuple[str, str]] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    evictions: list[str] = field(default_factory=list)
    unfreed: list[int] = field(default_factory=list)
    grown: dict[str, int] = field(default_factory=dict)
    recycled: int = 0

    def load_ended(self, model: ModelName, outcome: str) -> None:
        """See `Measurements.load_ended`."""
        self.loads.append((model, outcome))

    def phase_took(self, phase: str, duration_ms: int) -> None:
        """See `Measurements.phase_took`."""

    def unloaded(self, reason: str) -> None:
        """See `Measurements.unloaded`."""
        self.unloads.append(reason)

    def evicted(self, tier: str) -> None:
        """See `Measurements.evicted`."""
        self.evictions.append(tier)

    def tiers(self, state: loading_pb2.NodeState) -> None:
        """See `Measurements.tiers`."""

    def not_freed(self, device: int) -> None:
        """See `Measurements.not_freed`."""
        self.unfreed.append(device)

    def unaccounted(self, where: str, size: int) -> None:
        """See `Measurements.unaccounted`."""
        self.grown[where] = size

    def server_recycled(self) -> None:
        """See `Measurements.server_recycled`."""
        self.recycled += 1

    def moving(self, done: int, total: int) -> None:
        """See `Measurements.moving`."""


@dataclass(slots=True)
class FakeProcesses:
    """`ModelProcesses` set by hand: Triton name → process ids; nothing is known of names that are not in it."""

    pids: dict[str, list[int]] = field(default_factory=dict)
    bytes_each: int = 0
    ended: list[int] = field(default_factory=list)
    why_not: str = ""
    """Why processes cannot be ended; empty = they can."""
    beside: ServerMemory | None = None

    async def find(self, triton_name: str) -> Sequence[int] | None:
        """See `ModelProcesses.find`."""
        return self.pids.get(triton_name)

    async def end(self, pids: Sequence[int]) -> None:
        """See `ModelProcesses.end`."""
        if self.why_not:
            raise Unavailable(self.why_not)
        self.ended += pids

    async def memory_bytes(self, pids: Sequence[int]) -> int:
        """See `ModelProcesses.memory_bytes`."""
        return self.bytes_each * len(pids)

    async def family(self, pids: Sequence[int]) -> Sequence[int]:
        """See `ModelProcesses.family`."""
        return pids

    async def server(self, models: Collection[str]) -> ServerMemory | None:
        """See `ModelProcesses.server`."""
        return self.beside

    async def end_server(self, pid: int, patience_ms: int) -> None:
        """See `ModelProcesses.end_server`."""
        await self.end([pid])


@dataclass(slots=True)
class FakeInventory:
    """`DeviceInventory` set by hand."""

    devices: tuple[Device, ...]
    used: dict[int, int] | None = None
    """Bytes in use on each device; None = it cannot be told."""
    held: dict[int, dict[int, int]] = field(default_factory=dict)
    """Process id → bytes on each device."""

    async def used_bytes(self) -> Mapping[int, int] | None:
        """See `DeviceInventory.used_bytes`."""
        return self.used

    async def held_by(self, pids: Sequence[int]) -> Mapping[int, int]:
        """See `DeviceInventory.held_by`."""
        indices = {index for pid in pids for index in self.held.get(pid, {})}
        return {index: sum(self.held.get(pid, {}).get(index, 0) for pid in pids) for index in indices}


@dataclass(slots=True)
class FakeNodeMemory:
    """`NodeMemory` in a field."""

    remembered: Remembered = field(default_factory=Remembered)

    async def recall(self) -> Remembered:
        """See `NodeMemory.recall`."""
        return self.remembered

    async def keep(self, remembered: Remembered) -> None:
        """See `NodeMemory.keep`."""
        self.remembered = remembered


@dataclass(slots=True)
class SmallNode:
    """The loader of a node of 400 device bytes, and everything a test may turn."""

    clock: VirtualClock
    node: Node
    control: FakeModelControl
    cache: FakeWeightCache
    arena: FakeWeightArena
    processes: FakeProcesses
    memory: FakeNodeMemory
    library: FakeLibrary
    audit: KeptNotes
    measurements: KeptMeasurements
    steps: Steps
    caches: CacheTiers
    orders: Orders
    prestage: Prestage
    maintenance: Maintenance
    gauge: ProgressGauge
    watch: TritonWatch
    inventory: FakeInventory
    leaks: LeakWatch
    shelf: FakeShelf
    adapters: Adapters
    board: FakeBoard

    async def load(
        self, model: Model, generation: int = 0, *, first: Sequence[Model] = (), **more: object
    ) -> list[Progress]:
        """Order a load and follow it to its end."""
        victims = tuple(version_of(victim) for victim in first)
        order = LoadOrder(version_of(model), generation, victims, **more)  # type: ignore[arg-type]
        return [progress async for progress in self.orders.ensure_loaded(order)]

    async def stage(
        self, model: Model, *, to_host: bool = True, reason: str = "prewarm", **more: object
    ) -> list[Progress]:
        """Order a staging and follow it to its end."""
        order = StageOrder(version_of(model), to_host, reason=reason, **more)  # type: ignore[arg-type]
        return [progress async for progress in self.prestage.ensure_staged(order)]

    async def unload(self, model: Model, generation: int = 0) -> bool:
        """Order an unload and wait for it."""
        self.prestage.cancel(version_of(model))
        return await self.orders.ensure_unloaded(UnloadOrder(version_of(model), generation))

    def state(self, model: Model) -> State:
        """Where a version stands; REGISTERED if nobody asked for it."""
        home = self.node.residences.get(version_of(model))
        return State.REGISTERED if home is None else home.instance.state

    @property
    def device(self) -> tuple[int, int]:
        """(resident, reserved) bytes of the device."""
        return self.node.device.resident, self.node.device.reserved


@asynccontextmanager
async def small_node(
    models: Sequence[Model],
    *,
    device_bytes: int = 400,
    disk_bytes: int = 10_000,
    host_bytes: int = 1_000,
    adapter_bytes: int = 100,
    watched: bool = False,
    memory: FakeNodeMemory | None = None,
    triton: FakeModelControl | None = None,
    berths: FakeBoard | None = None,
    devices: Sequence[Device] = (),
) -> AsyncIterator[SmallNode]:
    """A node whose catalogue and sources have `models`; `watched` runs the watch each second, as a process does.

    `memory`, `triton` and `berths` are those of an earlier process."""
    clock = VirtualClock()
    library = FakeLibrary({version_of(model): model for model in models})
    sources = {model.source_path: source_of(model) for model in models}
    control = triton or FakeModelControl(clock)
    cache, arena = FakeWeightCache(clock, sources), FakeWeightArena(clock, host_bytes)
    audit, measurements, processes = KeptNotes(), KeptMeasurements(), FakeProcesses()
    remembered = memory or FakeNodeMemory()
    inventory = FakeInventory(tuple(devices) or (Device(0, "device-0", device_bytes),))
    node = Node(DeviceLedger.of(inventory.devices), ContentLedger(disk_bytes))
    async with asyncio.TaskGroup() as tasks:
        steps, stagings = Steps(node, clock, tasks), Stagings(clock, STALL_MS)
        gauge = ProgressGauge(node, stagings, clock)
        leavers = Leavers(node, audit, measurements, clock)
        caches = CacheTiers(node, steps, cache, arena, stagings, leavers, clock)
        parts = Parts(control, library, audit, measurements, processes, inventory, clock, LOAD_TIMEOUT_MS)
        board = berths or FakeBoard()
        berthing = Berthing(node, board, library, clock, steps)
        await berthing.start()
        steps.performed_by(Performer(node, steps, caches, parts, berthing).perform)
        recollection = Recollection(node, remembered)
        watch = TritonWatch(node, steps, control, library, audit, measurements, recollection, clock)
        orders = Orders(node, steps, library, gauge, clock)
        prestage = Prestage(node, caches, library, gauge, clock)
        maintenance = Maintenance(node, steps, prestage, recollection)
        succession = Succession(node, steps, caches, library, audit, clock)
        shelf = FakeShelf()
        adapters = Adapters(node, caches, library, shelf, leavers, audit, clock, berthing)
        await caches.start()
        await adapters.start(adapter_bytes)
        await recollection.recall()
        await watch.turn()
        beat = asyncio.create_task(_beat(watch, succession, clock)) if watched else None
        yield SmallNode(
            clock,
            node,
            control,
            cache,
            arena,
            processes,
            remembered,
            library,
            audit,
            measurements,
            steps,
            caches,
            orders,
            prestage,
            maintenance,
            gauge,
            watch,
            inventory,
            LeakWatch(node, processes, inventory, audit, measurements, LEAK_BYTES),
            shelf,
            adapters,
            board,
        )
        if beat is not None:
            beat.cancel()
        await succession.stop()
        await adapters.stop()
        await prestage.stop()
        await steps.settle(SETTLED_MS)


def source_of(model: Model) -> FakeSource:
    """What lies at a model's source, if the catalogue is right."""
    return FakeSource(model.digest, model.files or (small_file(f"{model.name}1", 100),))


async def _beat(watch: TritonWatch, succession: Succession, clock: VirtualClock) -> None:
    while True:
        await clock.sleep_ms(1_000)
        await watch.turn()
        await succession.turn()


def on_a_small_node(
    *models: Model, **sizes: int | bool | Sequence[Device]
) -> Callable[[Callable[[SmallNode], Awaitable[None]]], Callable[[], None]]:
    """Run a test inside a node of its own, in virtual time."""

    def decorate(test: Callable[[SmallNode], Awaitable[None]]) -> Callable[[], None]:
        async def work() -> None:
            async with small_node(models, **sizes) as node:  # type: ignore[arg-type]
                await test(node)

        def run() -> None:
            run_virtual(work())

        run.__doc__, run.__name__ = test.__doc__, getattr(test, "__name__", "test")
        return run

    return decorate


async def outcome(work: Awaitable[object]) -> RoundhouseError | None:
    """The error that some work ends with."""
    try:
        await work
    except RoundhouseError as error:
        return error
    return None

"""A whole loader without a process: real operations over fakes, in virtual time. Run it with `run_virtual`."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.catalogue.records import Engine, Interface, Model
from roundhouse.errors import NotFound
from roundhouse.vocabulary import Digest, ModelName
from roundhouse.wire.v1 import loading_pb2
from services.loader.domain.instance import State
from services.loader.domain.memory_ledger import MemoryLedger
from services.loader.domain.versions import ModelVersion, triton_model_name
from services.loader.operations.caches import CacheTiers
from services.loader.operations.ensure import LoadOrder, Orders, Progress, UnloadOrder
from services.loader.operations.node import Node
from services.loader.operations.perform import Parts, Performer
from services.loader.operations.steps import Steps
from services.loader.operations.watch_triton import TritonWatch
from services.loader.ports import AuditNote, LoadPackage
from tests.fakes.clock import VirtualClock
from tests.fakes.model_control import FakeModelControl
from tests.fakes.weight_cache import FakeWeightCache

LOAD_TIMEOUT_MS = 10_000
SETTLED_MS = 120_000


def small_model(name: str, device_bytes: int = 100, version: int = 1) -> Model:
    """A catalogue record; its digest is made from name and version."""
    return Model(
        name=ModelName(name),
        source_path=f"/models/{name}",
        engine=Engine.REFERENCE,
        interface=Interface.LLM,
        digest=Digest("sha256:" + f"{name}{version}".encode().hex().ljust(64, "0")),
        device_bytes=device_bytes,
    )


def version_of(model: Model) -> ModelVersion:
    """The version that a record describes."""
    return ModelVersion(model.name, model.digest)


@dataclass(slots=True)
class FakeLibrary:
    """`ModelLibrary` set by hand; `knobs` go to the fake Triton with each package."""

    models: dict[ModelVersion, Model] = field(default_factory=dict)
    knobs: dict[ModelName, dict[str, str]] = field(default_factory=dict)
    is_known: bool = True

    def find(self, version: ModelVersion) -> Model:
        """See `ModelLibrary.find`."""
        if version not in self.models:
            raise NotFound(f"the catalogue has no {version}")
        return self.models[version]

    def versions(self) -> Mapping[str, ModelVersion]:
        """See `ModelLibrary.versions`."""
        return {triton_model_name(version): version for version in self.models}

    async def device_bytes(self, model: Model) -> int:
        """See `ModelLibrary.device_bytes`."""
        return model.device_bytes

    async def package(self, model: Model, weights: Path) -> LoadPackage:
        """See `ModelLibrary.package`."""
        knobs = self.knobs.get(model.name, {})
        return LoadPackage(json.dumps({"parameters": {name: {"string_value": text} for name, text in knobs.items()}}))


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

    def load_ended(self, model: ModelName, outcome: str) -> None:
        """See `Measurements.load_ended`."""
        self.loads.append((model, outcome))

    def phase_took(self, phase: str, duration_ms: int) -> None:
        """See `Measurements.phase_took`."""

    def unloaded(self, reason: str) -> None:
        """See `Measurements.unloaded`."""
        self.unloads.append(reason)

    def tiers(self, state: loading_pb2.NodeState) -> None:
        """See `Measurements.tiers`."""


@dataclass(slots=True)
class SmallNode:
    """The loader of a node of 400 device bytes, and everything a test may turn."""

    clock: VirtualClock
    node: Node
    control: FakeModelControl
    cache: FakeWeightCache
    library: FakeLibrary
    audit: KeptNotes
    measurements: KeptMeasurements
    steps: Steps
    caches: CacheTiers
    orders: Orders
    watch: TritonWatch

    async def load(
        self, model: Model, generation: int = 0, *, first: Sequence[Model] = (), **more: object
    ) -> list[Progress]:
        """Order a load and follow it to its end."""
        victims = tuple(version_of(victim) for victim in first)
        order = LoadOrder(version_of(model), generation, victims, **more)  # type: ignore[arg-type]
        return [progress async for progress in self.orders.ensure_loaded(order)]

    async def unload(self, model: Model, generation: int = 0) -> bool:
        """Order an unload and wait for it."""
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
    weights_bytes: int = 100,
    watched: bool = False,
) -> AsyncIterator[SmallNode]:
    """A node whose catalogue and sources have `models`; `watched` runs the watch each second, as a process does."""
    clock = VirtualClock()
    library = FakeLibrary({version_of(model): model for model in models})
    sources = {model.source_path: (model.digest, weights_bytes) for model in models}
    control, cache = FakeModelControl(clock), FakeWeightCache(clock, sources)
    audit, measurements = KeptNotes(), KeptMeasurements()
    node = Node(MemoryLedger(device_bytes), MemoryLedger(1_000), MemoryLedger(disk_bytes))
    async with asyncio.TaskGroup() as tasks:
        steps = Steps(node, clock, tasks)
        caches = CacheTiers(node, steps, cache, clock)
        parts = Parts(control, library, audit, measurements, clock, LOAD_TIMEOUT_MS)
        steps.performed_by(Performer(node, steps, caches, parts).perform)
        watch = TritonWatch(node, steps, control, library, audit, measurements)
        orders = Orders(node, steps, library, clock)
        await caches.start()
        await watch.turn()
        beat = asyncio.create_task(_beat(watch, clock)) if watched else None
        yield SmallNode(clock, node, control, cache, library, audit, measurements, steps, caches, orders, watch)
        await steps.settle(SETTLED_MS)
        if beat is not None:
            beat.cancel()


async def _beat(watch: TritonWatch, clock: VirtualClock) -> None:
    while True:
        await clock.sleep_ms(1_000)
        await watch.turn()

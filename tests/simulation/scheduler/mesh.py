"""A node as the scheduler meets it: just enough to drive it over any `EventBus`; `fake_gateway` has the other side.

The node keeps a real ledger and refuses what the real loader refuses; it records every load and unload, and fails the
test at once if an instance in use is unloaded (invariant 8) or memory is overspent (invariant 6)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from roundhouse import subjects
from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, DeadlinePassed, Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.vocabulary import Digest, ModelName, PoolName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2

POOL = PoolName("shared")


def model(name: str, **fields: object) -> Model:
    """A language model with sizes that tests override."""
    values: dict[str, object] = {
        "name": ModelName(name),
        "source_path": f"/models/{name}",
        "engine": Engine.REFERENCE,
        "interface": Interface.LLM,
        "digest": Digest(f"sha256:{name}"),
        "slots": 2,
        "device_bytes": 100,
        "context_tokens": 4096,
    }
    return Model(**(values | fields))  # type: ignore[arg-type]


def catalogue(*models: Model) -> Catalogue:
    """A catalogue of models; unknown tenants get default limits."""
    return Catalogue(generation=1, models={each.name: each for each in models})


@dataclass
class FixedCatalogue:
    """`CatalogueSource` that a test sets."""

    current: Catalogue


@dataclass
class FakeNode:
    """A loader and its Triton. `now_running` is what gateways stream from it."""

    bus: EventBus
    clock: Clock
    source: FixedCatalogue
    node_id: str = "n1"
    capacity: int = 100
    load_ms: int = 1_000
    broken: set[str] = field(default_factory=set)  # models whose load fails
    dead: set[str] = field(default_factory=set)  # models whose process died: ready by name only
    host_capacity: int = 0
    staged: dict[str, int] = field(default_factory=dict)  # in host memory only; model → since
    stuck: set[str] = field(default_factory=set)  # models whose unload is never confirmed
    unloading: dict[str, int] = field(default_factory=dict)
    silent: bool = False
    accepting: bool = True
    ready: dict[str, int] = field(default_factory=dict)  # model → since
    loading: dict[str, int] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    idle_ms: dict[str, int] = field(default_factory=dict)  # when it was first told that nobody uses what leaves
    now_running: Counter[str] = field(default_factory=Counter)
    sequence: int = 0
    address: str = ""  # of its loader; empty = its id
    instances_max: int = 0
    role: "vocabulary_pb2.NodeRole.ValueType" = vocabulary_pb2.NODE_ROLE_MIXED
    devices: tuple[int, ...] = ()  # capacities, all of one link group; empty = one of the node's capacity, not told
    mig: bool = False
    alone: dict[str, str] = field(default_factory=dict)  # model → who has its devices alone
    stands: dict[str, tuple[int, ...]] = field(default_factory=dict)  # model → devices
    together_max: Counter[str] = field(default_factory=Counter)  # model → most requests at once
    pool: PoolName = POOL
    deaf: bool = False  # takes no orders, but is heard
    first_token_ms: int = 0  # told with each finish, by whoever runs here
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def state(self) -> loading_pb2.NodeState:
        """What it says of itself."""
        self.sequence += 1
        state = loading_pb2.NodeState(
            node_id=self.node_id,
            sequence=self.sequence,
            incarnation="a",
            sent_unix_ms=self.clock.now_ms(),
            pool=self.pool,
            role=self.role,
            kvstore_address=f"{self.node_id}:kv",
            accepting=self.accepting,
            triton_grpc_address=f"{self.node_id}:8001",
            loader_address=self.address or self.node_id,
        )
        used = sum(self._size(name) for name in (*self.ready, *self.unloading))
        reserved = sum(self._size(name) for name in self.loading)
        assert used + reserved <= self.capacity, "invariant 6"
        for index, capacity in enumerate(self.devices):
            taken = self._on_device(index, (*self.ready, *self.unloading))
            coming = self._on_device(index, self.loading)
            assert taken + coming <= capacity, "invariant 6 on a device"
            state.devices.add(index=index, capacity=capacity, resident=taken, reserved=coming, mig=self.mig)
        state.tiers.add(tier=vocabulary_pb2.TIER_DEVICE, capacity=self.capacity, resident=used, reserved=reserved)
        kept = sum(self._size(name) for name in self.staged)
        assert kept <= max(self.host_capacity, 0), "invariant 6 in host memory"
        state.tiers.add(tier=vocabulary_pb2.TIER_HOST, capacity=self.host_capacity, resident=kept)
        for residence, names in (
            (vocabulary_pb2.INSTANCE_STATE_STAGED, {n: at for n, at in self.staged.items() if n not in self.ready}),
            (vocabulary_pb2.INSTANCE_STATE_READY, self.ready),
            (vocabulary_pb2.INSTANCE_STATE_LOADING, self.loading),
            (vocabulary_pb2.INSTANCE_STATE_UNLOADING, self.unloading),
        ):
            for name, since_ms in names.items():
                spec = self.source.current.models[ModelName(name)]
                state.instances.add(
                    version=vocabulary_pb2.ModelVersion(model=name, digest=spec.digest),
                    state=residence,
                    triton_model_name=f"{name}--1",
                    device_bytes=spec.device_bytes,
                    state_since_unix_ms=since_ms,
                    load_ms=self.load_ms,
                    slots=spec.slots,
                    devices=self.stands.get(name, ()),
                    tier=vocabulary_pb2.TIER_HOST if name in self.staged else vocabulary_pb2.TIER_UNSPECIFIED,
                )
        return state

    def _on_device(self, index: int, names: Iterable[str]) -> int:
        """Bytes of these models on a device: an even share of each that stands there."""
        return sum(
            -(-self._size(name) // len(self.stands[name])) for name in names if index in self.stands.get(name, ())
        )

    async def announce(self) -> None:
        """Publish the state, unless it has gone silent."""
        if not self.silent:
            await self.bus.publish(subjects.node_state(self.node_id), self.state().SerializeToString())

    async def live(self) -> None:
        """Announce twice a second, as loaders do, until cancelled."""
        while True:
            await self.announce()
            await self.clock.sleep_ms(500)

    async def load(self, request: loading_pb2.EnsureLoadedRequest) -> AsyncIterator[loading_pb2.LoadProgress]:
        """EnsureLoaded. The load is the node's own work: it goes on when the caller leaves."""
        name = request.version.model
        if self.silent:
            raise Unavailable("the loader is away")
        if request.target == vocabulary_pb2.TIER_HOST:
            self.staged[name] = self.clock.now_ms()
            await self.announce()
            yield loading_pb2.LoadProgress(state=vocabulary_pb2.INSTANCE_STATE_STAGED)
            return
        if name not in self.ready and name not in self.loading:
            victims = [victim.model for victim in request.unload_first]
            if self.stuck & set(victims):
                await self._wait_in_vain(self.stuck & set(victims), request.deadline_ms)
            self._make_room(name, victims, tuple(request.devices), request.alone_for)
            self.loads.append(name)
            self.stands[name] = tuple(request.devices)
            self.loading[name] = self.clock.now_ms()
            task = asyncio.create_task(self._load(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        yield loading_pb2.LoadProgress(state=vocabulary_pb2.INSTANCE_STATE_LOADING)
        while name in self.loading:
            await self.clock.sleep_ms(10)
        if name not in self.ready:
            raise Unavailable(f"{name}: the weights file is empty")
        yield loading_pb2.LoadProgress(state=vocabulary_pb2.INSTANCE_STATE_READY)

    async def _wait_in_vain(self, victims: set[str], deadline_ms: int) -> None:
        for victim in victims:
            self.unloading[victim] = self.ready.pop(victim)
        await self.announce()
        await self.clock.sleep_ms(deadline_ms)
        raise DeadlinePassed("what had to leave first was not gone")

    async def _load(self, name: str) -> None:
        await self.announce()
        await self.clock.sleep_ms(self.load_ms)
        del self.loading[name]
        if name not in self.broken:
            self.ready[name] = self.clock.now_ms()
            self.instances_max = max(self.instances_max, len(self.ready))
        await self.announce()

    async def unload(self, request: loading_pb2.EnsureUnloadedRequest) -> None:
        """EnsureUnloaded; whatever runs there has died already."""
        name = request.version.model
        if self.deaf:
            raise Unavailable("the loader takes no orders")
        if request.reason == "idle":
            assert name in self.unloading, "only of what leaves"
            assert not self.now_running[name], "only of what runs nothing"
            self.idle_ms.setdefault(name, self.clock.now_ms())
            return
        self.dead.discard(name)
        if name in self.stuck:
            self.unloading[name] = self.ready.pop(name, self.unloading.get(name, 0))
            await self.announce()
            raise DeadlinePassed("it is still unloading")
        if name in self.ready:
            assert request.reason == "broken" or not self.now_running[name], f"invariant 8: {name} is in use"
            del self.ready[name]
            self.unloads.append(name)
            await self.announce()

    def _make_room(self, name: str, victims: list[str], devices: tuple[int, ...], alone_for: str) -> None:
        self.alone[name] = alone_for
        for victim in victims:
            if self._fits(name, devices) and not self._strangers(name, devices):
                break
            if victim in self.ready:
                assert not self.now_running[victim], f"invariant 8: {victim} is in use"
                del self.ready[victim]
                self.unloads.append(victim)
        if not self._fits(name, devices) or self._strangers(name, devices):
            raise CapacityExhausted(f"{name} does not fit")

    def _strangers(self, name: str, devices: tuple[int, ...]) -> list[str]:
        """Who cannot stay beside it: it or they have their devices alone."""
        there = {*self.ready, *self.loading, *self.unloading} - {name}
        return [
            each
            for each in there
            if set(self.stands.get(each, ())) & set(devices) and self.alone.get(each, "") != self.alone[name]
        ]

    def _fits(self, name: str, devices: tuple[int, ...]) -> bool:
        there = (*self.ready, *self.loading, *self.unloading)
        share = -(-self._size(name) // max(1, len(devices)))
        on_devices = all(self.devices[index] - self._on_device(index, there) >= share for index in devices)
        return on_devices and self._free() >= self._size(name)

    def _free(self) -> int:
        return self.capacity - sum(self._size(each) for each in (*self.ready, *self.loading, *self.unloading))

    def _size(self, name: str) -> int:
        return self.source.current.models[ModelName(name)].device_bytes


@dataclass
class FakeLoaders:
    """`LoaderFleet` of fake nodes; a node's address is its id."""

    nodes: dict[str, FakeNode] = field(default_factory=dict)

    async def ensure_loaded(
        self, address: str, request: loading_pb2.EnsureLoadedRequest
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        async for progress in self.nodes[address].load(request):
            yield progress

    async def ensure_unloaded(self, address: str, request: loading_pb2.EnsureUnloadedRequest) -> None:
        await self.nodes[address].unload(request)

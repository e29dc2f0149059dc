"""Runs scheduler replicas, nodes and gateways together on any clock and bus, and stops all of it at the end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from roundhouse.catalogue.records import Model
from roundhouse.clock import Clock
from roundhouse.event_bus import EventBus
from roundhouse.lifecycle import Lifecycle
from services.scheduler.app import Parts, Replica
from services.scheduler.ports import SchedulingStore
from services.scheduler.settings import SchedulerSettings
from tests.fakes.audit_trail import RecordedAudit
from tests.fakes.block_lists import FakeBlockLists
from tests.fakes.history import InMemoryHistory
from tests.fakes.scheduler_instruments import CountingInstruments
from tests.simulation.scheduler.fake_gateway import FakeGateway
from tests.simulation.scheduler.mesh import FakeLoaders, FakeNode, FixedCatalogue, catalogue


class World:
    """One cluster of a test."""

    def __init__(self, bus: EventBus, store: SchedulingStore, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self.bus, self.store, self.clock, self._tasks = bus, store, clock, tasks
        self.source = FixedCatalogue(catalogue())
        self.loaders = FakeLoaders()
        self.gateways: list[FakeGateway] = []
        self.instruments = CountingInstruments()
        self.history = InMemoryHistory()
        self.audit = RecordedAudit()
        self.block_lists = FakeBlockLists()
        self._running: list[asyncio.Task[None]] = []
        self.replicas: list[RunningReplica] = []

    def offer(self, *models: Model) -> None:
        """Put models into the catalogue."""
        self.source.current = catalogue(*models)

    def spawn(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run until the world ends."""

        async def run() -> None:
            await work()

        task = self._tasks.create_task(run())
        self._running.append(task)
        return task

    async def node(
        self, node_id: str = "n1", *, capacity: int = 100, load_ms: int = 1_000, **fields: object
    ) -> FakeNode:
        """Start a node."""
        node = FakeNode(self.bus, self.clock, self.source, node_id, capacity, load_ms, **fields)  # type: ignore[arg-type]
        self.loaders.nodes[node_id] = node
        self.spawn(node.live)
        return node

    async def gateway(self, gateway_id: str = "g1") -> FakeGateway:
        """Start a gateway."""
        gateway = FakeGateway(self.bus, self.clock, self.loaders.nodes, gateway_id)
        await gateway.start()
        self.gateways.append(gateway)
        self.spawn(gateway.live)
        return gateway

    async def scheduler(self, name: str = "s1", **settings: object) -> "RunningReplica":
        """Start a replica."""
        replica = RunningReplica(self, name, settings)
        self.replicas.append(replica)
        await replica.started.wait()
        return replica

    def stop(self) -> None:
        """End everything."""
        for task in self._running:
            task.cancel()


class RunningReplica:
    """One scheduler replica in a task of its own, so that it can be killed."""

    def __init__(self, world: World, name: str, fields: dict[str, object]) -> None:
        self.started = asyncio.Event()
        self._world = world
        self._settings = SchedulerSettings(instance_id=name, **fields)  # type: ignore[arg-type]
        self._task = world.spawn(self._run)

    async def _run(self) -> None:
        world = self._world
        parts = Parts(
            world.bus,
            world.store,
            world.source,
            world.loaders,
            world.clock,
            world.instruments,
            world.history,
            world.audit,
            world.block_lists,
        )
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            self.replica = Replica(self._settings, parts)
            async with self.replica.running(lifecycle):
                self.started.set()
                await lifecycle.stopping.wait()

    async def kill(self) -> None:
        """End it now, wherever it is."""
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def world_on(bus: EventBus, store: SchedulingStore, clock: Clock) -> AsyncIterator[World]:
    """A world that is stopped at the end; a failed part fails the test."""
    async with asyncio.TaskGroup() as tasks:
        world = World(bus, store, clock, tasks)
        try:
            yield world
        finally:
            world.stop()

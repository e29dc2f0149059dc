"""Puts one loader together: ledgers, caches, Triton, orders over gRPC, news over NATS.

Order of start: the disk cache first (it cleans up and takes over), then one look at Triton, so that the first state the
mesh sees is true; orders are taken last. At the end the node says that it takes nothing more, running loads finish
within the drain time, and Triton keeps what it has: the next loader process adopts it.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse.catalogue.store import CatalogueReader
from roundhouse.clock import SystemClock
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.lifecycle import Application, Lifecycle
from roundhouse.ops_server import Readiness, serve_ops
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import NodeId
from roundhouse.wire.v1 import loading_pb2_grpc, vocabulary_pb2
from services.loader.adapters.adapter_shelf import MemoryShelf
from services.loader.adapters.berth_links import BerthLinks
from services.loader.adapters.disk_cache import DiskCache
from services.loader.adapters.find_devices import inventory
from services.loader.adapters.grpc_loader import SERVICE, Handlers, LoaderServicer
from services.loader.adapters.metrics import PrometheusMeasurements
from services.loader.adapters.model_library import CatalogueLibrary
from services.loader.adapters.model_processes import StubProcesses
from services.loader.adapters.nats_node import BusAuditTrail, NatsStateSink
from services.loader.adapters.node_memory import NodeFile
from services.loader.adapters.object_source import ObjectSource
from services.loader.adapters.shared_arena import SharedArena
from services.loader.adapters.triton_control import TritonControl
from services.loader.domain.contents import ContentLedger
from services.loader.domain.device_ledger import DeviceLedger
from services.loader.operations.adapters import Adapters
from services.loader.operations.berthing import Berthing
from services.loader.operations.caches import CacheTiers
from services.loader.operations.describe import Identity
from services.loader.operations.ensure import Orders
from services.loader.operations.leaks import LOOK_MS, LeakWatch
from services.loader.operations.leavers import Leavers
from services.loader.operations.maintenance import Maintenance, Recollection
from services.loader.operations.node import Node
from services.loader.operations.perform import Parts, Performer
from services.loader.operations.prestage import Prestage
from services.loader.operations.progress import ProgressGauge
from services.loader.operations.staging import Stagings
from services.loader.operations.steps import Steps
from services.loader.operations.succession import Succession
from services.loader.operations.tell import Announcer
from services.loader.operations.watch_triton import TURN_MS, TritonWatch
from services.loader.settings import LoaderSettings

log = structlog.get_logger(__name__)

CONDITIONS_MS = 1_000
CONDITION_TIMEOUT_S = 1.0
AUDIT_FLUSH_MS = 2_000
_ROLES = {
    "mixed": vocabulary_pb2.NODE_ROLE_MIXED,
    "prefill": vocabulary_pb2.NODE_ROLE_PREFILL,
    "decode": vocabulary_pb2.NODE_ROLE_DECODE,
}


def application(settings: LoaderSettings) -> Application:
    """The loader of one node. Starting raises Unavailable (NATS, cache folder, port)."""

    @asynccontextmanager
    async def run(lifecycle: Lifecycle) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            bus = await connect_bus(settings.nats_url, name=f"loader-{settings.node_id}")
            stack.push_async_callback(bus.close)
            redis = open_redis(settings.redis_url)
            stack.push_async_callback(redis.aclose)
            catalogue = CatalogueReader(redis, bus)
            await catalogue.start(lifecycle)
            loader = _Loader(settings, bus, catalogue)
            await loader.start(lifecycle, stack)
            readiness = Readiness("triton", "nats", "redis", "catalogue")
            lifecycle.every(CONDITIONS_MS, _conditions(readiness, loader.node, bus, redis, catalogue), "conditions")
            await stack.enter_async_context(serve_ops(readiness, settings.bind_host, settings.ops_port))
            yield
            await loader.drain()

    return run


class _Loader:
    """The parts of one loader, wired."""

    def __init__(self, settings: LoaderSettings, bus: NatsBus, catalogue: CatalogueReader) -> None:
        self._settings = settings
        node_id = NodeId(settings.node_id)
        self._inventory = inventory(settings.devices, settings.device_bytes)
        self.node = Node(DeviceLedger.of(self._inventory.devices), ContentLedger(settings.disk_bytes))
        self._clock = SystemClock()
        self._control = TritonControl(settings.triton_grpc, settings.triton_repository)
        stall_ms = round(settings.source_stall_seconds * 1000)
        self._cache = DiskCache(settings.cache_dir, self._clock, ObjectSource(stall_ms, tokens=settings.tokens_by_host))
        self._arena = SharedArena(settings.arena_path, settings.host_bytes)
        self._stagings = Stagings(self._clock, stall_ms, settings.staging_bytes_per_second)
        self._gauge = ProgressGauge(self.node, self._stagings, self._clock)
        self._library = CatalogueLibrary(catalogue, settings.kvstore_address)
        self._audit = BusAuditTrail(bus, node_id, self._clock)
        self._sink = NatsStateSink(bus, node_id)
        self._measurements = PrometheusMeasurements()
        self._server = GrpcServer()
        self._drains: list[Callable[[], Awaitable[None]]] = []

    async def start(self, lifecycle: Lifecycle, stack: AsyncExitStack) -> None:
        """Take over what is on disk and in Triton, then take orders. What is opened is closed by `stack`."""
        stack.push_async_callback(self._control.close)
        stack.callback(self._cache.close)
        stack.callback(self._arena.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        steps = Steps(self.node, self._clock, tasks)
        leavers = Leavers(self.node, self._audit, self._measurements, self._clock)
        caches = CacheTiers(self.node, steps, self._cache, self._arena, self._stagings, leavers, self._clock)
        processes = StubProcesses(int(self._settings.triton_grpc.rpartition(":")[2]))
        parts = Parts(
            self._control,
            self._library,
            self._audit,
            self._measurements,
            processes,
            self._inventory,
            self._clock,
            round(self._settings.load_timeout_seconds * 1000),
            round(self._settings.unload_patience_seconds * 1000),
        )
        berthing = Berthing(self.node, BerthLinks(self._settings.berths_path), self._library, self._clock, steps)
        await berthing.start()
        steps.performed_by(Performer(self.node, steps, caches, parts, berthing).perform)
        recollection = Recollection(self.node, NodeFile(self._settings.cache_dir))
        watch = TritonWatch(
            self.node, steps, self._control, self._library, self._audit, self._measurements, recollection, self._clock
        )
        lifecycle.spawn(self._audit.send(), "audit")
        await caches.start()
        await recollection.recall()
        await watch.turn()
        prestage = Prestage(self.node, caches, self._library, self._gauge, self._clock)
        maintenance = Maintenance(self.node, steps, prestage, recollection)
        if self.node.maintenance:
            await maintenance.begin(self.node.maintenance)  # an earlier process may not have come to its end
        orders = Orders(self.node, steps, self._library, self._gauge, self._clock)
        shelf = MemoryShelf(self._settings.adapter_shelf_path)
        adapters = Adapters(self.node, caches, self._library, shelf, leavers, self._audit, self._clock, berthing)
        await adapters.start(self._settings.adapter_host_bytes)
        handlers = Handlers(orders, prestage, self._gauge, maintenance, adapters)
        succession = Succession(self.node, steps, caches, self._library, self._audit, self._clock)
        announcer = await self._serve(handlers, watch, lifecycle)
        lifecycle.every(TURN_MS, succession.turn, "succession")
        leaks = LeakWatch(
            self.node,
            processes,
            self._inventory,
            self._audit,
            self._measurements,
            self._settings.leak_bytes,
        )
        lifecycle.every(LOOK_MS, leaks.turn, "leaks")
        lifecycle.every(TURN_MS, adapters.turn, "adapters")
        if self._settings.host_prefault:
            lifecycle.spawn(self._arena.fault_in(), "fault in")
        self._drains = [
            succession.stop,
            handlers.prestage.stop,
            adapters.stop,
            lambda: steps.settle(round(self._settings.drain_seconds * 1000)),
            lambda: self._server.stop(1.0),
            lambda: self._audit.flush(AUDIT_FLUSH_MS),
        ]
        log.info("loader_ready", node=self._settings.node_id, grpc_port=self._server.port, announced=announcer)

    async def drain(self) -> None:
        """Refuse new loads and say so; let running ones end within the drain time."""
        self.node.start_draining()
        for turn in self._drains:
            await turn()

    async def _serve(self, handlers: Handlers, watch: TritonWatch, lifecycle: Lifecycle) -> str:
        identity = self._identity()
        announcer = Announcer(self.node, identity, self._gauge, self._sink, self._measurements, self._clock)
        servicer = LoaderServicer(handlers, self.node, announcer)
        loading_pb2_grpc.add_LoaderServicer_to_server(servicer, self._server.server)
        port = await self._server.start(self._settings.bind_host, self._settings.grpc_port, [SERVICE])
        announcer.reached_at(f"{self._settings.advertise_host}:{port}")
        lifecycle.every(TURN_MS, watch.turn, "triton watch")
        lifecycle.spawn(announcer.publish_states(), "publish states")
        lifecycle.spawn(announcer.keep_states(), "keep states")
        return f"{self._settings.advertise_host}:{port}"

    def _identity(self) -> Identity:
        settings = self._settings
        return Identity(
            node_id=settings.node_id,
            incarnation=uuid.uuid4().hex,
            pool=settings.pool,
            role=_ROLES[settings.node_role],
            triton_address=settings.triton_address_for_gateways,
            loader_address="",
            kvstore_address=settings.kvstore_address,
        )


def _conditions(
    readiness: Readiness, node: Node, bus: NatsBus, redis: Redis, catalogue: CatalogueReader
) -> Callable[[], Awaitable[None]]:
    """Looks at every condition of readiness."""

    async def turn() -> None:
        readiness.set("triton", reason=node.unhealthy_reason or None)
        readiness.set("nats", reason=None if bus.connected else "NATS does not answer")
        readiness.set("catalogue", reason=catalogue.not_ready_reason)
        try:
            async with asyncio.timeout(CONDITION_TIMEOUT_S):
                await cast("Awaitable[Any]", redis.ping())
            readiness.set("redis", reason=None)
        except (RedisError, OSError, TimeoutError):
            readiness.set("redis", reason="Redis does not answer")

    return turn

"""Puts one scheduler replica together. Any number run at once over one Redis; there is no leader.

Order of start: the catalogue and the nodes' last words first, then the loops, then the subscriptions, so that the first
submit meets a replica that can judge it. At the end it stops taking messages; grants and refusals that it has not
delivered are in the store, and the other replicas deliver them.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse.audit_trail import BusAuditTrail
from roundhouse.catalogue.store import CatalogueReader
from roundhouse.clock import Clock, SystemClock
from roundhouse.event_bus import EventBus, connect_bus
from roundhouse.lifecycle import Application, Lifecycle
from roundhouse.ops_server import Readiness, serve_ops
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import PoolName
from services.scheduler.adapters.bus_edge import BusGatewayLink, BusHandlers, BusUsageOutlet
from services.scheduler.adapters.forecast_edge import ForecastEdge
from services.scheduler.adapters.grpc_kvstores import GrpcBlockLists
from services.scheduler.adapters.grpc_loaders import GrpcLoaderFleet
from services.scheduler.adapters.metrics import PrometheusInstruments
from services.scheduler.adapters.node_bucket import stored_states
from services.scheduler.adapters.redis_history import RedisHistory
from services.scheduler.adapters.redis_store import RedisSchedulingStore
from services.scheduler.domain.placement import ResidencyPolicy
from services.scheduler.domain.prefix_index import PrefixIndex
from services.scheduler.domain.records import Ticket
from services.scheduler.operations.blocks import BlockFollower
from services.scheduler.operations.broken import BrokenInstances
from services.scheduler.operations.completion import Completion
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.foresight import Foresight
from services.scheduler.operations.idle_leavers import IdleLeavers
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.operations.outlook import Outlooks
from services.scheduler.operations.pools import Pools
from services.scheduler.operations.prestage import Prestaging
from services.scheduler.operations.residency import Residency
from services.scheduler.operations.submit import Submission
from services.scheduler.operations.upkeep import Upkeep
from services.scheduler.operations.waits import WaitBook
from services.scheduler.ports import (
    AuditTrail,
    BlockLists,
    CatalogueSource,
    History,
    Instruments,
    LoaderFleet,
    SchedulingStore,
)
from services.scheduler.settings import SchedulerSettings, device_time_pools, fairness

CONDITIONS_MS = 1_000
TIDY_MS = 60_000  # how long the blocks of a node that has gone are kept at most, beyond what the registry keeps it
IDLE_LOOK_MS = 1_000  # as the states of the nodes
PRESTAGE_MS = 5_000  # as the plan of the devices
HISTORY_MS = 1_000  # arrivals closer than this are one to a forecast


def application(settings: SchedulerSettings) -> Application:
    """One replica. Starting raises Unavailable (NATS, port); a Redis that is away only makes it unready."""

    @asynccontextmanager
    async def run(lifecycle: Lifecycle) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            bus = await connect_bus(settings.nats_url, name=f"scheduler-{settings.instance_id}")
            stack.push_async_callback(bus.close)
            redis = open_redis(settings.redis_url)
            stack.push_async_callback(redis.aclose)
            loaders = GrpcLoaderFleet()
            stack.push_async_callback(loaders.close)
            block_lists = GrpcBlockLists()
            stack.push_async_callback(block_lists.close)
            catalogue = CatalogueReader(redis, bus)
            await catalogue.start(lifecycle)
            store = RedisSchedulingStore(redis, fairness(settings), device_time_pools(settings))
            clock = SystemClock()
            replica = Replica(
                settings,
                Parts(
                    bus,
                    store,
                    catalogue,
                    loaders,
                    clock,
                    PrometheusInstruments(),
                    RedisHistory(redis),
                    BusAuditTrail(bus, clock),
                    block_lists,
                ),
            )
            for state in await stored_states(bus):
                replica.nodes.seed(state)
            await stack.enter_async_context(replica.running(lifecycle))
            readiness = Readiness("nats", "redis", "catalogue", "nodes")
            lifecycle.every(CONDITIONS_MS, _conditions(readiness, bus, redis, catalogue, replica.nodes), "conditions")
            await stack.enter_async_context(serve_ops(readiness, settings.bind_host, settings.ops_port))
            yield

    return run


@dataclass(frozen=True, slots=True)
class Parts:
    """What a replica is made of; tests pass fakes."""

    bus: EventBus
    store: SchedulingStore
    catalogue: CatalogueSource
    loaders: LoaderFleet
    clock: Clock
    instruments: Instruments
    history: History
    audit: AuditTrail
    block_lists: BlockLists


class Replica:
    """One scheduler over the given parts."""

    def __init__(self, settings: SchedulerSettings, parts: Parts) -> None:
        store, clock, instruments = parts.store, parts.clock, parts.instruments
        self.nodes = NodeRegistry(clock)
        self.pools = pools = Pools(store, self.nodes, parts.catalogue, clock, disaggregated=settings.disaggregate)
        policy = ResidencyPolicy(quantum_ms=round(settings.rotation_seconds * 1000))
        index = PrefixIndex()
        self._blocks = BlockFollower(index, parts.block_lists, self.nodes, clock)
        waits = WaitBook(pools, instruments, parts.audit, policy)
        self._dispatcher = Dispatcher(
            store,
            pools,
            BusGatewayLink(parts.bus),
            BusUsageOutlet(parts.bus),
            clock,
            instruments,
            cluster=settings.cluster,
        )
        self.foresight = Foresight(
            parts.history, pools, clock, instruments, policy=settings.eviction, prewarm=settings.prewarm
        )
        self._dispatcher.on_granted = self._note_grant
        self._residency = Residency(
            store,
            pools,
            parts.loaders,
            self._dispatcher,
            clock,
            instruments,
            self.foresight,
            parts.audit,
            waits,
            owner=settings.instance_id,
            policy=policy,
            load_deadline_ms=round(settings.load_deadline_seconds * 1000),
        )
        self._broken = BrokenInstances(store, pools, parts.loaders, self._dispatcher, clock)
        self._idle_leavers = IdleLeavers(pools, parts.loaders, clock)
        self._upkeep = Upkeep(store, pools, self._dispatcher, self._residency, self._broken, clock, instruments)
        self._dispatcher.on_cold = self._upkeep.hurry
        self.nodes.listen(self._dispatcher.wake)
        outlooks = Outlooks(pools, index, policy, clock)
        submission = Submission(pools, self._dispatcher, clock, instruments, self.foresight, outlooks)
        completion = Completion(store, self._dispatcher, clock, instruments, self._broken, self.foresight, pools.speeds)
        self._prestaging = Prestaging(pools, parts.loaders, self.foresight, clock) if settings.prewarm else None
        self._forecasts = ForecastEdge(parts.bus, self.foresight, parts.catalogue)
        self._handlers = BusHandlers(parts.bus, submission, completion, self.nodes, self._blocks, waits, clock)

    def _note_grant(self, pool: PoolName, ticket: Ticket) -> None:
        self.foresight.granted(pool, ticket.version, ticket.granted_ms - ticket.enqueued_ms)

    async def _tidy(self) -> None:
        self._blocks.tidy()

    @asynccontextmanager
    async def running(self, lifecycle: Lifecycle) -> AsyncIterator[None]:
        """Take work while the context is open."""
        lifecycle.spawn(self._dispatcher.run(), "dispatch")
        lifecycle.spawn(self._upkeep.run(), "upkeep")
        lifecycle.every(HISTORY_MS, self.foresight.turn, "history")
        if self._prestaging is not None:
            lifecycle.every(PRESTAGE_MS, self._prestaging.turn, "prestage")
        lifecycle.every(IDLE_LOOK_MS, self._idle_leavers.turn, "idle leavers")
        lifecycle.every(TIDY_MS, self._tidy, "tidy")
        subscriptions = [*await self._handlers.subscribe(), await self._forecasts.subscribe()]
        try:
            yield
        finally:
            for subscription in subscriptions:
                await subscription.stop()
            await self._blocks.stop()
            await self._broken.stop()
            await self._residency.stop()
            if self._prestaging is not None:
                await self._prestaging.stop()


def _conditions(
    readiness: Readiness, bus: EventBus, redis: Redis, catalogue: CatalogueReader, nodes: NodeRegistry
) -> Callable[[], Any]:
    async def turn() -> None:
        readiness.set("nats", reason=None if bus.connected else "not connected")
        readiness.set("redis", reason=await _redis_fault(redis))
        readiness.set("catalogue", reason=catalogue.not_ready_reason)
        readiness.set("nodes", reason=None if nodes.any_present else "no node was heard of lately")

    return turn


async def _redis_fault(redis: Redis) -> str | None:
    try:
        await cast("Any", redis.ping())
    except (RedisError, OSError, TimeoutError) as error:
        return f"no answer: {type(error).__name__}"
    return None

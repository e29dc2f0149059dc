"""A whole gateway in the test's event loop, over a real bus and store, with the test's own scheduler and node."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import httpx

from roundhouse.catalogue.records import Catalogue
from roundhouse.clock import SystemClock
from roundhouse.event_bus import Handler, Message, NatsBus, connect_bus
from roundhouse.lifecycle import Lifecycle
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import KeyId, TenantId
from roundhouse.wire.v1.scheduling_pb2 import Placement
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.app import Addresses, World, application
from services.gateway.domain.keys import KeyRecord, key_hash
from services.gateway.ports import InferenceNode
from services.gateway.settings import GatewaySettings
from tests.fakes.catalogue import FixedCatalogue
from tests.integration.gateway.bus_scheduler import BusScheduler

KEYS = {"t1": "rh-key-of-tenant-one-000000000000", "t2": "rh-key-of-tenant-two-000000000000"}
UNUSED_PLACEMENT = Placement(node_id="node-1", triton_grpc_address="127.0.0.1:1", triton_model_name="m")


@dataclass
class RunningGateway:
    """A gateway that serves, and what it told others."""

    addresses: Addresses
    scheduler: BusScheduler
    bus: NatsBus
    catalogue: FixedCatalogue
    lifecycle: Lifecycle
    events: list[UsageEvent] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Base address of the HTTP API."""
        return f"http://127.0.0.1:{self.addresses.http}"

    def client(self, tenant: str = "t1", **headers: str) -> httpx.AsyncClient:
        """An HTTP client with the key of a tenant."""
        return httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {KEYS[tenant]}", **headers}, timeout=20
        )

    async def usage(self, count: int) -> list[UsageEvent]:
        """The first `count` usage events, once the stream has them; more than that fail the test."""
        await until(lambda: len(self.events) >= count)
        await asyncio.sleep(
            0.1
        )  # for the one event too many that a fault would make; they leave in groups, 50 ms apart
        assert len(self.events) == count
        return self.events


@asynccontextmanager
async def running_gateway(
    nats_url: str,
    redis_url: str,
    catalogue: Catalogue,
    *,
    node: InferenceNode | None = None,
    placement: Placement = UNUSED_PLACEMENT,
    **settings: object,
) -> AsyncIterator[RunningGateway]:
    """Start everything; leaving drains the gateway. `node` None dials the placement."""
    bus = await connect_bus(nats_url, name="test")
    scheduler = BusScheduler(bus, placement)
    await scheduler.start()
    await _add_keys(redis_url)
    view = FixedCatalogue(catalogue)
    outbox_dir = TemporaryDirectory(prefix="rh-outbox-")
    addresses = Addresses()
    values = {
        "nats_url": nats_url,
        "redis_url": redis_url,
        "instance_id": "g1",
        "cluster": "c",
        "http_port": 0,
        "grpc_port": 0,
        "admin_port": 0,
        "drain_seconds": 5,
        "outbox_dir": outbox_dir.name,
        **settings,
    }
    world = World(catalogue=view, node=node)
    app = application(GatewaySettings(**values), world, addresses)  # type: ignore[arg-type]  # fields of the settings
    try:
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            async with app(lifecycle):
                gateway = RunningGateway(addresses, scheduler, bus, view, lifecycle)
                await bus.subscribe("rh.v1.usage.>", _keep(gateway))
                yield gateway
            lifecycle.cancel_tasks()
    finally:
        await scheduler.stop()
        await bus.close()
        outbox_dir.cleanup()


async def until(true: Callable[[], bool], *, within_s: float = 60) -> None:
    """Wait for something that real servers do in their own time."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - there is no event to wait for across processes
            await asyncio.sleep(0.01)


def _keep(gateway: RunningGateway) -> Handler:
    async def on_event(message: Message) -> None:
        gateway.events.append(UsageEvent.FromString(message.data))

    return on_event


async def _add_keys(redis_url: str) -> None:
    redis = open_redis(redis_url)
    registry = RedisKeyRegistry(redis)
    for tenant, text in KEYS.items():
        record = KeyRecord(
            key_id=KeyId(f"key-{tenant}"),
            tenant_id=TenantId(tenant),
            key_hash=key_hash(text),
            scopes=frozenset({"inference"}),
            label="",
            created_ms=SystemClock().now_ms(),
            expires_ms=0,
        )
        await registry.add(record)
    await redis.aclose()

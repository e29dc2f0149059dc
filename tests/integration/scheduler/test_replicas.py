"""Scheduler replicas on real NATS and Valkey: nothing lost, nothing granted twice, whichever replica dies."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from deploy.local.ports import free_ports
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.clock import SystemClock
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.lifecycle import Lifecycle
from roundhouse.redis_edge import open_redis
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc
from services.scheduler.adapters.redis_store import RedisSchedulingStore
from services.scheduler.app import application
from services.scheduler.settings import SchedulerSettings
from tests.simulation.scheduler.fake_gateway import FakeGateway
from tests.simulation.scheduler.harness import World, world_on
from tests.simulation.scheduler.mesh import POOL, FakeNode, FixedCatalogue, catalogue, model

REQUESTS = 300


@asynccontextmanager
async def real_world(nats_url: str, redis_url: str) -> AsyncIterator[World]:
    """A world whose bus and store are real."""
    bus = await connect_bus(nats_url, name="test")
    redis = open_redis(redis_url)
    try:
        async with world_on(bus, RedisSchedulingStore(redis), SystemClock()) as world:
            yield world
    finally:
        await redis.aclose()
        await bus.close()


async def settle(gateway: FakeGateway, *, within_s: float) -> None:
    """Wait until every request has ended."""
    until = time.monotonic() + within_s
    while any(not asked.endings for asked in gateway.asked.values()):
        assert time.monotonic() < until, [key for key, asked in gateway.asked.items() if not asked.endings]
        await asyncio.sleep(0.02)


async def _is_busy(world: World) -> bool:
    state = await world.store.snapshot(POOL, world.clock.now_ms())
    return bool(state.in_use or state.depths)


async def test_replicas_share_the_work_and_one_may_die(nats_url: str, redis_url: str) -> None:
    """Invariant 1: of 300 requests on two replicas, one killed midway, each is granted and ends exactly once."""
    async with real_world(nats_url, redis_url) as world:
        m = model("m", slots=8)
        world.offer(m)
        await world.scheduler("s1")
        second = await world.scheduler("s2")
        node, gateway = await world.node(load_ms=100), await world.gateway()
        await asyncio.sleep(0.3)
        requests = [gateway.ask(f"r{n}", m, run_ms=10, tenant_id=f"t{n % 3}") for n in range(REQUESTS)]

        async def submit_all() -> None:
            for each in requests:
                await gateway.submit(each)

        submitting = asyncio.create_task(submit_all())
        await asyncio.sleep(0.25)
        await second.kill()
        await submitting
        await settle(gateway, within_s=30)
        assert gateway.outcomes() == {"done": REQUESTS}
        assert node.loads == ["m"]
        async with asyncio.timeout(60):  # the last ending comes with a heartbeat if the one that died had heard it
            while await _is_busy(world):  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.05)


async def test_the_queue_survives_the_restart_of_every_replica(nats_url: str, redis_url: str) -> None:
    """Requests that were accepted by a replica that is gone are granted by the next one."""
    async with real_world(nats_url, redis_url) as world:
        m = model("m", slots=4)
        world.offer(m)
        first = await world.scheduler("s1")
        await world.node(load_ms=1_500)
        gateway = await world.gateway()
        await asyncio.sleep(0.3)
        requests = [gateway.ask(f"r{n}", m, run_ms=10) for n in range(20)]
        await asyncio.gather(*(gateway.submit(each) for each in requests))
        assert all(each.accepted for each in requests)
        await first.kill()
        await world.scheduler("s2")
        await settle(gateway, within_s=30)
        assert gateway.outcomes() == {"done": 20}


class _GrpcLoader(loading_pb2_grpc.LoaderServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def EnsureLoaded(
        self, request: loading_pb2.EnsureLoadedRequest, context: Any
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        async for progress in self._node.load(request):
            yield progress

    async def EnsureUnloaded(
        self, request: loading_pb2.EnsureUnloadedRequest, context: Any
    ) -> loading_pb2.EnsureUnloadedReply:
        raise AssertionError("the scheduler never asks for this")

    async def DrainNode(
        self, request: loading_pb2.DrainNodeRequest, context: Any
    ) -> AsyncIterator[loading_pb2.NodeState]:
        assert not request.ListFields(), "the scheduler never asks for this"
        yield self._node.state()

    async def ResumeNode(self, request: loading_pb2.ResumeNodeRequest, context: Any) -> loading_pb2.NodeState:
        raise AssertionError("the scheduler never asks for this")

    async def EnsureAdapter(
        self, request: loading_pb2.EnsureAdapterRequest, context: Any
    ) -> loading_pb2.EnsureAdapterReply:
        raise AssertionError("the scheduler never asks for this")

    async def GetNodeState(self, request: loading_pb2.GetNodeStateRequest, context: Any) -> loading_pb2.NodeState:
        return self._node.state()


async def test_the_composed_service_serves(nats_url: str, redis_url: str) -> None:
    """The real composition: catalogue from Redis, loader over gRPC, readiness that names what is missing."""
    bus: NatsBus = await connect_bus(nats_url, name="test")
    redis = open_redis(redis_url)
    m = model("m")
    await CatalogueStore(redis).put(catalogue(m), expected_generation=0)
    (ops_port,) = free_ports(1)
    settings = SchedulerSettings(nats_url=nats_url, redis_url=redis_url, ops_port=ops_port)
    server = GrpcServer()
    try:
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(base_url=f"http://127.0.0.1:{ops_port}") as ops:
            lifecycle = Lifecycle(tasks)
            async with application(settings)(lifecycle):
                assert "nodes" in (await ops.get("/health/ready")).text
                node = FakeNode(bus, SystemClock(), FixedCatalogue(catalogue(m)), load_ms=100)
                loading_pb2_grpc.add_LoaderServicer_to_server(_GrpcLoader(node), server.server)
                node.address = f"127.0.0.1:{await server.start('127.0.0.1', 0, [])}"
                gateway = FakeGateway(bus, SystemClock(), {"n1": node})
                await gateway.start()
                lifecycle.spawn(node.live(), "node")
                lifecycle.spawn(gateway.live(), "gateway")
                async with asyncio.timeout(30):
                    while not (await ops.get("/health/ready")).json()["ready"]:  # noqa: ASYNC110 - it is polled
                        await asyncio.sleep(0.05)
                await gateway.submit(gateway.ask("r", m))
                await settle(gateway, within_s=30)
                assert gateway.outcomes() == {"done": 1}
                page = (await ops.get("/metrics")).text
                assert 'roundhouse_scheduler_grants_total{model="m",pool="shared"} 1.0' in page
            lifecycle.cancel_tasks()
    finally:
        await server.stop(0)
        await redis.aclose()
        await bus.close()

"""Two scheduler processes on real NATS and Valkey, one of them stopped for seconds, or killed, amid the load."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from deploy.local.ports import free_ports
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.clock import SystemClock
from roundhouse.environment import child_environment
from roundhouse.event_bus import Message, NatsBus, connect_bus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.redis_edge import open_redis
from roundhouse.wire.v1 import loading_pb2_grpc
from services.scheduler.adapters.redis_store import RedisSchedulingStore
from tests.integration.scheduler.test_replicas import _GrpcLoader, settle
from tests.simulation.scheduler.fake_gateway import FakeGateway
from tests.simulation.scheduler.mesh import POOL, FakeNode, FixedCatalogue, catalogue, model

TAKEOVER_MS = 3_000
M = model("m", slots=4)


@dataclass
class Scene:
    """A node, a gateway, and scheduler processes."""

    bus: NatsBus
    gateway: FakeGateway
    store: RedisSchedulingStore
    processes: list[subprocess.Popen[bytes]]
    abandoned: list[bytes] = field(default_factory=list)

    async def ask(self, seconds: float, name: str) -> list[asyncio.Task[object]]:
        """A request each 40 ms."""
        tasks: list[asyncio.Task[object]] = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            asked = self.gateway.ask(f"{name}{len(tasks)}", M, run_ms=40, tenant_id=f"t{len(tasks) % 3}")
            tasks.append(asyncio.create_task(self.gateway.submit(asked)))
            await asyncio.sleep(0.04)
        return tasks

    async def idle(self) -> None:
        """Wait until no slot is in use and nothing waits."""
        for _ in range(600):
            state = await self.store.snapshot(POOL, SystemClock().now_ms())
            if not state.in_use and not state.depths:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(state)

    def waits_ms(self, since_ms: int) -> list[int]:
        """Submit to grant of what was submitted since."""
        return [
            each.granted_ms - each.submitted_ms for each in self.gateway.asked.values() if each.submitted_ms >= since_ms
        ]


@asynccontextmanager
async def scene(nats_url: str, redis_url: str) -> AsyncIterator[Scene]:
    """Two replicas that are ready, and a gateway that has had its first answer."""
    bus, redis = await connect_bus(nats_url, name="test"), open_redis(redis_url)
    await CatalogueStore(redis).put(catalogue(M), expected_generation=0)
    server = GrpcServer()
    ports = free_ports(2)
    processes: list[subprocess.Popen[bytes]] = []
    node = FakeNode(bus, SystemClock(), FixedCatalogue(catalogue(M)), load_ms=50)
    loading_pb2_grpc.add_LoaderServicer_to_server(_GrpcLoader(node), server.server)
    node.address = f"127.0.0.1:{await server.start('127.0.0.1', 0, [])}"
    gateway = FakeGateway(bus, SystemClock(), {"n1": node})
    made = Scene(bus, gateway, RedisSchedulingStore(redis), processes)

    async def on_usage(message: Message) -> None:
        made.abandoned.append(message.data)

    await bus.subscribe("rh.v1.usage.>", on_usage)
    await gateway.start()
    living = [asyncio.create_task(node.live()), asyncio.create_task(gateway.live())]
    try:
        for number, port in enumerate(ports):
            processes.append(_start(number, port, nats_url, redis_url))
        async with httpx.AsyncClient() as client:
            for port in ports:
                await _ready(client, port)
        await gateway.submit(gateway.ask("first", M))
        yield made
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)
        await server.stop(0)
        await redis.aclose()
        await bus.close()


def _start(number: int, port: int, nats_url: str, redis_url: str) -> subprocess.Popen[bytes]:
    names = {"NATS_URL": nats_url, "REDIS_URL": redis_url, "OPS_PORT": str(port), "INSTANCE_ID": f"s{number}"}
    environment = child_environment({f"ROUNDHOUSE_{name}": value for name, value in names.items()})
    return subprocess.Popen([sys.executable, "-m", "services.scheduler"], env=environment, stdout=subprocess.DEVNULL)


async def _ready(client: httpx.AsyncClient, port: int) -> None:
    for _ in range(600):
        try:
            if (await client.get(f"http://127.0.0.1:{port}/health/ready")).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("the scheduler is not ready")


async def test_a_replica_that_was_frozen_does_no_harm_when_it_wakes(nats_url: str, redis_url: str) -> None:
    """Stopped for five seconds and woken: every request ends once, none is billed as abandoned, no slot is lost. What
    the frozen one draws goes to all of them a second later, so that none waits three seconds."""
    async with scene(nats_url, redis_url) as made:
        before = await made.ask(1.0, "a")
        os.kill(made.processes[0].pid, signal.SIGSTOP)
        frozen_ms = SystemClock().now_ms()
        during = await made.ask(5.0, "b")
        os.kill(made.processes[0].pid, signal.SIGCONT)
        after = await made.ask(1.5, "c")
        await asyncio.gather(*before, *during, *after)
        await settle(made.gateway, within_s=60)
        assert set(made.gateway.outcomes()) == {"done"}
        assert max(made.waits_ms(frozen_ms)) < TAKEOVER_MS + 1_000  # a second for a busy machine
        await made.idle()
        assert made.abandoned == []


async def test_a_killed_replica_is_missed_by_nobody(nats_url: str, redis_url: str) -> None:
    """Killed with messages in its hands: what it held is granted by the other within three seconds of its end."""
    async with scene(nats_url, redis_url) as made:
        before = await made.ask(1.0, "a")
        made.processes[0].kill()
        killed_ms = SystemClock().now_ms()
        after = await made.ask(2.0, "b")
        await asyncio.gather(*before, *after)
        await settle(made.gateway, within_s=60)
        assert set(made.gateway.outcomes()) == {"done"}
        assert max(made.waits_ms(killed_ms)) < TAKEOVER_MS + 1_000  # a second for a busy machine
        await made.idle()
        assert made.abandoned == []

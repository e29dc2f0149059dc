"""The bill of an attempt whose gateway vanished: owed until the stream has it, whoever settled the lease."""

import asyncio

import msgspec
import pytest

from roundhouse.catalogue.records import Tenant
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import PoolName, TenantId
from roundhouse.wire.v1 import usage_pb2
from services.scheduler.operations import deliveries
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.harness import world_on
from tests.simulation.scheduler.mesh import model


class RecordingBus(FakeBus):
    """Remembers every try to publish a usage event, and takes none before `takes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = False
        self.tries: list[bytes] = []

    async def publish_durable(self, subject: str, data: bytes, *, message_id: str) -> None:
        """See `FakeBus`."""
        self.tries.append(data)
        if not self.takes:
            raise Unavailable("the stream takes no message now")
        await super().publish_durable(subject, data, message_id=message_id)


@pytest.mark.parametrize("lease_seconds", [10.0, 4.0])
def test_a_settlement_is_published_by_whoever_is_left(lease_seconds: float) -> None:
    """Invariant 13: a gateway dies with one stream; the replica that settles the lease dies before it could publish;
    its successor, with another lease time in its settings, publishes the very same bytes, once."""

    async def story() -> None:
        bus = RecordingBus()
        async with world_on(bus, InMemorySchedulingStore(), VirtualClock()) as world:
            m = model("m")
            world.offer(m)
            await world.node(load_ms=100)
            doomed = await world.gateway()
            first = await world.scheduler("s1")
            await asyncio.sleep(1.1)
            await doomed.submit(doomed.ask("r", m, run_ms=60_000))
            await asyncio.sleep(2.5)
            doomed.crash()
            await asyncio.sleep(12)
            assert len(bus.tries) >= 2, "the lease has lapsed and its bill is owed"
            await first.kill()
            bus.tries.append(b"")  # what comes after this is the successor's
            bus.takes = True
            await world.scheduler("s2", lease_seconds=lease_seconds)
            await asyncio.sleep(2)
            assert set(bus.tries) - {b""} == {bus.tries[0]}
            assert bus.tries[-1] == bus.tries[0]
            assert len(bus.durable) == 1
            tries = len(bus.tries)
            await asyncio.sleep(30)
            assert len(bus.tries) == tries, "what the stream has is not sent again"
            event = usage_pb2.UsageEvent.FromString(bus.tries[0])
            assert (event.id, event.data.emitter) == ("r/1", deliveries.EMITTER)
            assert (event.data.input_tokens, event.data.output_tokens) == (10, 1)  # of the last heartbeat

    run_virtual(story())


@pytest.mark.parametrize("isolation", ["own", "shared"])
def test_a_pool_whose_last_node_has_gone_is_tended_until_nothing_waits_there(isolation: str) -> None:
    """One request runs, one waits with its gateway dead, and the pool's only node falls silent for good. At the
    deadline, a minute after the node was forgotten, nothing waits there any more: also if the catalogue does not name
    the pool now, and, if it does, for a replica that has never seen it."""

    async def story() -> None:
        async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
            m, own = model("m", slots=1), PoolName("own")
            world.offer(m)
            tenant = Tenant(name=TenantId("t1"), isolation=isolation)
            tenants = {tenant.name: tenant}
            world.source.current = msgspec.structs.replace(world.source.current, tenants=tenants)
            node, doomed = await world.node(pool=own), await world.gateway()
            first = await world.scheduler("s1")
            await asyncio.sleep(1.1)
            deadline_unix_ms = world.clock.now_ms() + 150_000
            for name in ("runs", "waits"):
                asked = doomed.ask(name, m, run_ms=300_000, pool=own, deadline_unix_ms=deadline_unix_ms)
                await doomed.submit(asked)
                await asyncio.sleep(1.5)
            doomed.crash()
            node.silent = True
            await asyncio.sleep(90)
            if isolation == own:
                await first.kill()
                await world.scheduler("s2")
            state = await world.store.snapshot(own, world.clock.now_ms())
            assert [each.waiting for each in state.depths] == [1]
            await asyncio.sleep(60)
            state = await world.store.snapshot(own, world.clock.now_ms())
            assert (state.depths, state.in_use) == ((), {})

    run_virtual(story())

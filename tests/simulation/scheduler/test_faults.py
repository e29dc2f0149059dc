"""A whole scheduler tier under faults, on virtual time: one seed reproduces one run.

Messages are lost and repeated, replicas die and come back, a gateway dies with requests queued and running, a node goes
silent. Every accepted request of a surviving gateway ends exactly once and in time (invariant 1), the dead gateway's
running requests are settled and billed once by the schedulers, and no slot, lease or drain mark is left behind.
"""

import asyncio
from random import Random

import pytest

from roundhouse.vocabulary import PriorityClass
from roundhouse.wire.v1 import usage_pb2, vocabulary_pb2
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.fake_gateway import FakeGateway
from tests.simulation.scheduler.harness import RunningReplica, World, world_on
from tests.simulation.scheduler.mesh import POOL, model

LOST, REPEATED = 0.04, 0.04
REQUESTS = 150
LONGEST_DEADLINE_MS = 60_000
CLASSES = list(PriorityClass)


class Chaos:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.calm = False

    def deliveries(self, subject: str) -> int:
        """How often a message arrives."""
        draw = self.chance.random()
        if self.calm or subject.startswith("rh.v1.usage"):
            return 1
        return 0 if draw < LOST else 2 if draw < LOST + REPEATED else 1

    async def clients(self, world: World, gateway: FakeGateway, number: int) -> None:
        """Requests of many tenants, sizes, classes and patience; some clients leave."""
        models = sorted(world.source.current.models.values(), key=lambda each: each.name)
        submits: list[asyncio.Task[object]] = []
        for n in range(REQUESTS // 3):
            patience_ms = self.chance.choice([3_000, 20_000, LONGEST_DEADLINE_MS])
            asked = gateway.ask(
                f"g{number}r{n}",
                self.chance.choice(models),
                run_ms=self.chance.randrange(50, 3_000),
                tenant_id=f"t{self.chance.randrange(5)}",
                priority_class=self.chance.choice(CLASSES).to_wire(),
                deadline_unix_ms=world.clock.now_ms() + patience_ms,
            )
            submits.append(asyncio.create_task(gateway.submit(asked)))
            await asyncio.sleep(self.chance.random() * 0.4)
            key = (asked.request.request_id, 1)
            if self.chance.random() < 0.1 and not asked.endings and key not in gateway._started:
                await gateway.cancel(asked)
        await asyncio.gather(*submits)

    async def replicas(self, world: World) -> None:
        """Replicas die and are replaced; at least one lives."""
        living: list[RunningReplica] = [await world.scheduler(f"s{n}") for n in range(3)]
        for n in range(8):
            await asyncio.sleep(1 + self.chance.random() * 3)
            await living.pop(self.chance.randrange(len(living))).kill()
            if len(living) < 2:
                living.append(await world.scheduler(f"again{n}"))


async def run(seed: int) -> None:
    chaos = Chaos(seed)
    bus = FakeBus(chaos.deliveries)
    async with world_on(bus, InMemorySchedulingStore(), VirtualClock()) as world:
        world.offer(*(model(f"m{n}", device_bytes=40 + 10 * n) for n in range(4)))
        nodes = [await world.node(f"n{n}", capacity=110, load_ms=500 + 500 * n) for n in range(2)]
        gateways = [await world.gateway(f"g{n}") for n in range(3)]
        replicas = asyncio.create_task(chaos.replicas(world))
        await asyncio.sleep(1.5)
        clients = [asyncio.create_task(chaos.clients(world, each, n)) for n, each in enumerate(gateways)]
        await asyncio.sleep(4)
        nodes[1].silent = True
        doomed = gateways[2]
        doomed.crash()
        clients[2].cancel()
        at_crash = {key for key in doomed._started if not doomed.asked[key].endings}
        await asyncio.sleep(6)
        nodes[1].silent = False
        await asyncio.wait(clients)
        await replicas
        chaos.calm = True
        await asyncio.sleep(LONGEST_DEADLINE_MS / 1000 + 12)
        check(world, gateways, at_crash, bus)
        state = await world.store.snapshot(POOL, world.clock.now_ms())
        assert (state.in_use, state.depths) == ({}, ())
        now_ms = world.clock.now_ms()  # marks and claims of dead replicas end by themselves
        assert all(mark.until_ms <= now_ms for mark in state.drains.values())
        assert all(claim.until_ms <= now_ms for claim in state.loads.values())


def check(world: World, gateways: list[FakeGateway], at_crash: set[tuple[str, int]], bus: FakeBus) -> None:
    """What must hold once all is quiet."""
    for gateway in gateways[:2]:
        for asked in gateway.asked.values():
            assert len(asked.endings) == 1, f"{asked.request.request_id} ended {asked.endings}"
            if asked.endings[0] in ("REASON_DEADLINE", "expired"):
                assert asked.ended_ms <= asked.request.deadline_unix_ms + 1_000
        outcomes = gateway.outcomes()
        assert outcomes["done"] > 0
        assert outcomes["expired"] <= outcomes.total() // 10, "mostly the scheduler tells in time"
    billed = {}
    for _, data in bus.durable.values():
        event = usage_pb2.UsageEvent.FromString(data)
        assert event.data.outcome == vocabulary_pb2.OUTCOME_ABANDONED
        billed[event.id] = event
    assert {f"{request_id}/{attempt}" for request_id, attempt in at_crash} <= billed.keys()
    survivors = {f"{key[0]}/1" for gateway in gateways[:2] for key in gateway.asked}
    assert not survivors & billed.keys(), "a living gateway bills its own requests"


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_whatever_fails(seed: int) -> None:
    """Invariants 1, 6, 7 and 8 hold through losses, repeats and crashes."""
    run_virtual(run(seed))

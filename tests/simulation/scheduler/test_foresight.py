"""What the past does for the future, on virtual time: victims by value, pre-warms, replicas, the audit of it all."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from roundhouse.catalogue.records import Model
from services.scheduler.domain.records import version_key
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.fake_gateway import FakeGateway
from tests.simulation.scheduler.harness import World, world_on
from tests.simulation.scheduler.mesh import POOL, model


def simulate(story: Callable[[World], Awaitable[None]]) -> None:
    """Run a story in a fresh world on virtual time."""

    async def run() -> None:
        async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
            await story(world)

    run_virtual(run())


async def call(gateway: FakeGateway, of: Model, number: int) -> bool:
    """One request to its end; whether it met a warm model."""
    asked = gateway.ask(f"{of.name}-{number}", of)
    reply = await gateway.submit(asked)
    assert reply is not None
    await asyncio.sleep(15)
    assert asked.endings == ["done"]
    return not reply.accepted.cold


@pytest.mark.parametrize(("eviction", "warm_least", "warm_most"), [("lru", 0, 0), ("value", 50, 90)])
def test_four_models_in_turn_in_room_for_three(eviction: str, warm_least: int, warm_most: int) -> None:
    """B24: each of four is called every minute, room for three. LRU never has the one that comes; the optimum has it
    two times in three. 100 calls after 20 to learn from."""

    async def story(world: World) -> None:
        four = [model(name) for name in "abcd"]
        world.offer(*four)
        await world.node(capacity=300)
        gateway = await world.gateway()
        await world.scheduler("s1", eviction=eviction, prewarm=False)
        await asyncio.sleep(1.1)
        warm = [await call(gateway, four[number % 4], number) for number in range(120)]
        assert warm_least <= sum(warm[20:]) <= warm_most

    simulate(story)


def test_a_model_that_is_called_by_a_timer_is_warm_when_it_is_called() -> None:
    """One place. A timer calls one model every ten minutes, people another in between: from the sixth period on the
    timer's model is put back before its call, and the audit stream says why the other left."""

    async def story(world: World) -> None:
        timer, other = model("timer"), model("other")
        world.offer(timer, other)
        await world.node(capacity=100)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        warm = []
        for period in range(12):
            warm.append(await call(gateway, timer, period))
            await asyncio.sleep(100)
            await call(gateway, other, period)
            await asyncio.sleep(600 - 100 - 2 * 15)
        assert all(warm[6:])
        prewarms = [each for each in world.audit.events if each.what == "load" and each.reason == "prewarm"]
        assert {each.details["outcome"] for each in prewarms} == {"ready"}
        evictions = [each for each in world.audit.events if each.what == "evict"]
        assert evictions
        assert all(each.reason.startswith("value: ") for each in evictions if each.details["because"] == "prewarm")

    simulate(story)


def test_without_a_past_nothing_is_loaded_before_it_is_wanted() -> None:
    """An idle cluster stays idle."""

    async def story(world: World) -> None:
        world.offer(model("a"), model("b"))
        node = await world.node(capacity=200)
        await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(60)
        assert node.loads == []

    simulate(story)


def test_a_busy_model_gets_a_second_replica_and_an_idle_cluster_none() -> None:
    """Two nodes, one slot an instance, a request of 900 ms every second: one instance is 90 % busy, so that many would
    wait beyond the promise of 300 ms; the signal says so and a second one is loaded on the other node, once."""

    async def story(world: World) -> None:
        busy = model("busy", slots=1, ttft_slo_ms=300)
        world.offer(busy)
        nodes = [await world.node("n1"), await world.node("n2")]
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for number in range(240):
            await gateway.submit(gateway.ask(f"r{number}", busy, run_ms=900))
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        assert gateway.outcomes() == {"done": 240}
        assert [node.loads for node in nodes] == [["busy"], ["busy"]]
        signal = world.instruments.signals[POOL].models[0]
        assert (signal.replicas, signal.replicas_wanted) == (2, 2)
        assert "would wait over 300 ms" in signal.reason

    simulate(story)


def test_a_replica_that_starts_later_knows_the_past() -> None:
    """The history is shared: what s2 forecasts after its first look is what s1 forecasts."""

    async def story(world: World) -> None:
        one = model("one")
        world.offer(one)
        await world.node()
        gateway = await world.gateway()
        first = await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for number in range(10):
            await call(gateway, one, number)
        second = await world.scheduler("s2")
        await asyncio.sleep(2)
        version = version_key(one.name, one.digest)
        mine, theirs = (each.replica.foresight.explain(POOL, version) for each in (first, second))
        assert mine is not None
        assert mine.arrivals == 10
        assert mine == theirs

    simulate(story)


def test_a_lost_history_costs_no_request_and_is_told_later() -> None:
    """The store of the history is away for a minute: requests run; what was counted meanwhile is told afterwards."""

    async def story(world: World) -> None:
        one = model("one")
        world.offer(one)
        await world.node()
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        world.history.away = True
        for number in range(4):
            await call(gateway, one, number)
        assert world.history.entries[POOL] == []
        world.history.away = False
        await asyncio.sleep(2)
        told = [each for entry in world.history.entries[POOL] for each in entry.versions.values()]
        assert sum(each.arrivals for each in told) == 4
        assert sum(each.ended for each in told) == 4

    simulate(story)


def test_what_is_expected_later_waits_in_host_memory() -> None:
    """Three models called in turn, one place on the device, host memory for one more: one that is not on the device is
    staged, and never more than is free."""

    async def story(world: World) -> None:
        three = [model(name) for name in "abc"]
        world.offer(*three)
        node = await world.node(capacity=100)
        node.host_capacity = 100
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for number in range(9):
            await call(gateway, three[number % 3], number)
        assert len(node.staged) == 1

    simulate(story)

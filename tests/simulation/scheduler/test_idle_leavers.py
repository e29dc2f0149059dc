"""Loaders hear which leaving instances nobody uses; what runs there is left alone."""

import asyncio

from services.scheduler.operations.idle_leavers import IDLE_MS
from tests.simulation.scheduler.harness import World
from tests.simulation.scheduler.mesh import FakeNode, model
from tests.simulation.scheduler.test_cases import simulate

LOOK_MS = 1_000  # between two looks, and between two states of a node


async def drained(world: World, run_ms: int) -> FakeNode:
    """A node that unloads `m` since now, at 4.1 s; a request of `run_ms` began on it at 4 s."""
    m = model("m")
    world.offer(m)
    node, gateway = await world.node(), await world.gateway()
    await world.scheduler("s1")
    await world.scheduler("s2")
    await asyncio.sleep(1)
    await gateway.submit(gateway.ask("first", m))
    await asyncio.sleep(3)
    await gateway.submit(gateway.ask("last", m, run_ms=run_ms))
    await asyncio.sleep(0.1)
    node.accepting = False
    node.unloading["m"] = node.ready.pop("m")
    await node.announce()
    return node


def test_what_leaves_and_nobody_uses_is_told_to_its_loader() -> None:
    """Triton keeps it after its last stream of 100 ms: the loader hears of it after `IDLE_MS`, and one or two looks."""

    async def story(world: World) -> None:
        node = await drained(world, 100)
        began_ms = world.clock.now_ms()
        await asyncio.sleep(20)
        assert IDLE_MS <= node.idle_ms["m"] - began_ms <= IDLE_MS + 3 * LOOK_MS

    simulate(story)


def test_a_stream_that_still_runs_there_has_its_time() -> None:
    """It runs 60 s while the node is drained: nothing is said before its end."""

    async def story(world: World) -> None:
        node = await drained(world, 60_000)
        began_ms = world.clock.now_ms()
        await asyncio.sleep(80)
        assert node.idle_ms["m"] - began_ms >= 60_000 - 100 + IDLE_MS - LOOK_MS
        assert world.gateways[0].asked[("last", 1)].endings == ["done"]

    simulate(story)


def test_a_loader_that_cannot_be_told_is_told_later() -> None:
    """It takes no orders for 30 s, and hears of it at the first turn after that: within `IDLE_MS` and two looks."""

    async def story(world: World) -> None:
        node = await drained(world, 100)
        node.deaf = True
        await asyncio.sleep(30)
        node.deaf, hears_ms = False, world.clock.now_ms()
        await asyncio.sleep(20)
        assert 0 <= node.idle_ms["m"] - hears_ms <= IDLE_MS + 2 * LOOK_MS

    simulate(story)

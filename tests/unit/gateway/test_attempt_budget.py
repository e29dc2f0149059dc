"""One attempt budget a request: three, all before the first token, never a second bill. Virtual time, fakes."""

import asyncio

import pytest

from roundhouse.errors import DeadlinePassed, EngineFailed, Unavailable
from roundhouse.vocabulary import Outcome
from services.gateway.ports import InstanceBroken
from tests.unit.gateway.gateway_world import GatewayWorld
from tests.unit.gateway.scenarios import billed, collect, in_world, the_event


def test_a_failure_before_the_first_token_is_tried_once_more_through_the_scheduler() -> None:
    """The first attempt fails and costs nothing; the second one answers; each has its own event and slot."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failures_left = 0, 1
        assert len(await collect(world)) == 3

    world = in_world(scenario)
    assert [event.id for event in world.usage.recorded] == ["r1/1", "r1/2"]
    assert [billed(event) for event in world.usage.recorded] == [(Outcome.FAILED, 0, 0), (Outcome.DONE, 10, 3)]
    assert [submit.attempt for submit in world.scheduler.submitted] == [1, 2]
    assert [finished.attempt for finished in world.scheduler.finishes] == [1, 2]


def test_the_third_attempt_is_the_last_and_pauses_grow() -> None:
    """Two failures before the first token, pauses of 250 and 1,500 ms, then an answer; the one bill is the third's."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failures_left = 0, 2
        began_ms = world.clock.monotonic_ms()
        assert len(await collect(world)) == 3
        assert world.clock.monotonic_ms() - began_ms == 250 + 1_500

    world = in_world(scenario)
    assert [event.id for event in world.usage.recorded] == ["r1/1", "r1/2", "r1/3"]
    assert [billed(event) for event in world.usage.recorded] == [
        (Outcome.FAILED, 0, 0),
        (Outcome.FAILED, 0, 0),
        (Outcome.DONE, 10, 3),
    ]


def test_three_failures_use_the_budget_up() -> None:
    """After the third failure the client hears of it; there is no fourth attempt, and no token is billed."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after = 0
        with pytest.raises(EngineFailed):
            await collect(world)

    world = in_world(scenario)
    assert [submit.attempt for submit in world.scheduler.submitted] == [1, 2, 3]
    assert [billed(event) for event in world.usage.recorded] == [(Outcome.FAILED, 0, 0)] * 3


def test_a_broken_instance_is_named_in_the_finish_of_each_attempt_that_met_it() -> None:
    """The scheduler closes what a gateway found dead: the first finish says so, with its node; the second does not."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failures_left = 0, 1
        world.node.failure = InstanceBroken("The engine died while it ran the request.")
        assert len(await collect(world)) == 3

    world = in_world(scenario)
    assert [(done.instance_broken, done.node_id) for done in world.scheduler.finishes] == [
        (True, "node-1"),
        (False, "node-1"),
    ]


def test_an_instance_that_breaks_after_tokens_is_named_too() -> None:
    """Case B29: the stream ends with an error after 2 tokens, and the finish still says that the instance is dead."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failure = 2, InstanceBroken("The engine died while it ran the request.")
        with pytest.raises(InstanceBroken):
            await collect(world)

    world = in_world(scenario)
    [finished] = world.scheduler.finishes
    assert (finished.instance_broken, finished.output_tokens) == (True, 2)


def test_a_scheduler_that_goes_away_between_attempts_ends_the_request_at_once() -> None:
    """The second attempt cannot be submitted: that is told after the first pause, not tried again as if it had run."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after = 0
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(0.2)
        world.scheduler.away = True
        began_ms = world.clock.monotonic_ms()
        with pytest.raises(Unavailable):
            await task
        assert world.clock.monotonic_ms() - began_ms == 250 - 200

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.FAILED, 0, 0)
    assert [submit.attempt for submit in world.scheduler.submitted] == [1]


def test_the_deadline_ends_a_pause_between_attempts() -> None:
    """Case B14: with 100 ms left, the pause of 250 ms is not waited for."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after = 0
        with pytest.raises(DeadlinePassed):
            await collect(world, deadline_ms=100)

    assert billed(the_event(in_world(scenario))) == (Outcome.FAILED, 0, 0)

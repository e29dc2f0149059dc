"""An operator asks over the bus why a model is warm; a scheduler replica answers from the past it shares."""

import asyncio
from typing import Any

import pytest

from roundhouse.errors import NotFound, Unavailable
from services.gateway.adapters.admin_forecasts import BusForecasts
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.harness import world_on
from tests.simulation.scheduler.mesh import model


def test_the_answer_names_the_past_the_future_and_the_replicas() -> None:
    """A model called every 20 s, five times: one replica, arrivals 5, and the median of the next call is known."""

    async def story() -> dict[str, Any]:
        async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
            one, other = model("one"), model("other")
            world.offer(one, other)
            await world.node()
            gateway = await world.gateway()
            await world.scheduler("s1")
            await asyncio.sleep(1.1)
            for number in range(5):
                await gateway.submit(gateway.ask(f"r{number}", one))
                await asyncio.sleep(20)
            forecasts = BusForecasts(world.bus)
            unwanted = await forecasts.of("other")
            assert (unwanted["wanted_before"], unwanted["replicas"], unwanted["text"]) == (False, 0, "")
            with pytest.raises(NotFound):
                await forecasts.of("nobody")
            return await forecasts.of("one")

    found = run_virtual(story())
    assert found["arrivals"] == 5
    assert found["replicas"] == 1
    assert 0 < found["next_ms_p10"] <= found["next_ms_p50"] <= found["next_ms_p90"]
    assert set(found["loss_by_predictor"]) == {"histogram", "pooled", "timer", "recent", "trend", "day"}
    assert found["text"].startswith(f"{found['predictor']} foresees the next request in ")


def test_without_a_scheduler_the_question_is_refused() -> None:
    """Nobody listens: Unavailable, not a guess."""

    async def story() -> None:
        with pytest.raises(Unavailable):
            await BusForecasts(FakeBus()).of("one")

    run_virtual(story())

"""Case B46 on real parts: how much waits is the same number everywhere it is told."""

import asyncio
import time
from typing import Any

from roundhouse.telemetry import REGISTRY
from services.scheduler.adapters.metrics import PrometheusInstruments
from services.scheduler.adapters.redis_store import pool_prefix
from tests.integration.scheduler.test_store_faults import world_of
from tests.simulation.scheduler.mesh import POOL, model

CLASS = "standard"


async def told(redis: Any, version: str, store_says: int) -> tuple[int, int, float]:
    """The scheduler's own depth, the length of what Redis holds, and the gauge."""
    length = await redis.zcard(f"{pool_prefix(POOL)}age:2:{version}")
    labels = {"pool": POOL, "model": "single", "priority_class": CLASS}
    return store_says, length, REGISTRY.get_sample_value("roundhouse_scheduler_waiting", labels) or 0.0


async def test_depth_gauge_and_length_in_redis_are_one_number(nats_url: str, redis_url: str) -> None:
    """B46: the slot is busy; fifty queue, then leave. Fifty and then zero, by the store, in Redis and in the gauge."""
    async with world_of(nats_url, redis_url) as (world, redis):
        single, gauge = model("single", slots=1), PrometheusInstruments()
        world.offer(single)
        await world.node(load_ms=50)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(0.5)
        await gateway.submit(gateway.ask("long", single, run_ms=60_000))
        callers = [gateway.ask(f"c{n}", single, tenant_id=f"t{n % 4}") for n in range(50)]
        until = time.monotonic() + 30
        while not gateway.asked[("long", 1)].granted_ms:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        await asyncio.gather(*(gateway.submit(each) for each in callers))

        async def see() -> tuple[int, int, float]:
            state = await world.store.snapshot(POOL, world.clock.now_ms())
            gauge.observed(POOL, state)
            return await told(redis, f"single@{single.digest}", sum(each.waiting for each in state.depths))

        assert await see() == (50, 50, 50.0)
        await asyncio.gather(*(gateway.cancel(each) for each in callers))
        while await see() != (0, 0, 0.0):
            assert time.monotonic() < until
            await asyncio.sleep(0.05)

"""Decisions a second of the queues in a real Valkey, against an empty script, as tenants and models grow.

One decision is submit, grant and end of one request: three scripts, one after the other, from one replica. The limit is
three calls of an empty script with as many arguments. One caller at a time: it measures latency, not saturation.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, cast

from redis.asyncio import Redis

from benchmarks.report import Figure, Goal, Report
from benchmarks.simulation_worker import quantile
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import NodeId, Outcome, PoolName, PriorityClass, TenantId
from services.scheduler.adapters.redis_store import RedisSchedulingStore
from services.scheduler.domain.records import (
    Ending,
    Offer,
    QueueEntry,
    Room,
    Tokens,
    attempt_id,
    instance_key,
    version_key,
)
from tests import infra

NAME = "scheduler"
DESCRIPTION = "decisions a second and p99 of the queues in Valkey, against an empty script"

POOL = PoolName("bench")
NOW_MS = 1_800_000_000_000
EMPTY = "return 0"
EMPTY_ARGUMENTS = ["x" * 20] * 14  # as many as an enqueue has


def run(arguments: Sequence[str]) -> Report:
    """Measure. Options: decisions of each point, tenants, models."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    parser.add_argument("--decisions", type=int, default=1_000)
    parser.add_argument("--tenants", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 100, 1_000])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, infra.valkey_running(Path(folder)) as server:
        return asyncio.run(_measure(server.url, options.decisions, options.tenants, options.models))


async def _measure(url: str, decisions: int, tenants: Sequence[int], models: Sequence[int]) -> Report:
    figures: dict[str, Figure] = {}
    goals: list[Goal] = []
    redis = open_redis(url)
    try:
        for model_count in models:
            for tenant_count in tenants:
                await cast("Any", redis.flushall())
                took, empty = await _point(redis, decisions, tenant_count, model_count)
                name = f"tenants_{tenant_count}_models_{model_count}"
                figures[f"{name}_per_second"] = round(1e9 * len(took) / sum(took))
                figures[f"{name}_p99_us"] = quantile(took, 0.99) // 1000
                goals.append(Goal.at_least(f"{name}: share of the empty script's rate", 0.5, sum(empty) / sum(took)))
    finally:
        await redis.aclose()
    return Report(NAME, figures, {}, goals)


async def _point(redis: Redis, decisions: int, tenants: int, models: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of each decision, and of as many empty ones, in turn; every tenant has one request waiting."""
    store = RedisSchedulingStore(redis)
    for number in range(tenants):
        await store.enqueue(POOL, _entry(number, tenants, models), Room(10**6, 1), NOW_MS)
    took: list[int] = []
    empty: list[int] = []
    for number in range(tenants, tenants + decisions):
        begun = perf_counter_ns()
        entry = _entry(number, tenants, models)
        await store.enqueue(POOL, entry, Room(10**6, 1), NOW_MS)
        offer = Offer(instance_key(NodeId("n"), entry.version), entry.version, 1)
        granted = (await store.take(POOL, [offer], 1, NOW_MS)).granted
        await store.finish(POOL, [Ending(granted[0].attempt, Outcome.DONE, Tokens(10, 0, 10), 10)], NOW_MS)
        took.append(perf_counter_ns() - begun)
        begun = perf_counter_ns()
        for _ in range(3):
            await cast("Any", redis.eval(EMPTY, 1, "k", *EMPTY_ARGUMENTS))
        empty.append(perf_counter_ns() - begun)
    return took, empty


def _entry(number: int, tenants: int, models: int) -> QueueEntry:
    tenant = number % tenants
    version = version_key(f"m{tenant % models}", "sha256:1")
    return QueueEntry(
        attempt_id(str(number), 1), TenantId(f"t{tenant}"), version, PriorityClass.STANDARD, 10, 10, NOW_MS + 10**9
    )

"""Decisions a second of the queues in a real Valkey, against an empty script, as tenants and models grow.

One decision is the life of one request as a replica drives it while all slots are busy: a turn that queues it, and a
turn that ends one that ran and gives its slot to whoever is next. Every tenant has a request waiting meanwhile. The
limit is an empty script, also called by hash, as often and with the very arguments of those turns, through redis-py, as
anyone would measure a server's raw rate. Turns go through the scripts' own channel, as in production, which costs less
(decision 0096); so a second limit is the empty script through that channel: what the decision itself costs, in the
server and in the client, shows against this one. Each replica has a client of its own and one turn under way at a time,
as in production; `batch` is how many requests a busy replica's turn holds.
"""

import argparse
import asyncio
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, cast

from benchmarks.report import Figure, Goal, Report
from benchmarks.simulation_worker import quantile
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import NodeId, Outcome, PoolName, PriorityClass, TenantId
from services.scheduler.adapters import redis_records
from services.scheduler.adapters.redis_store import RedisSchedulingStore, pool_prefix
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Offer,
    QueueEntry,
    Room,
    Tokens,
    Turn,
    VersionKey,
    attempt_id,
    instance_key,
    version_key,
)
from services.scheduler.domain.service import Policy
from tests import infra

NAME = "scheduler"
DESCRIPTION = "decisions a second and p99 of the queues in Valkey, against an empty script"

POOL = PoolName("bench")
NOW_MS = 1_800_000_000_000
ROOM = Room(10**6, 1)
DIGEST = "sha256:1"
TAKE_MAX = 64
SPARE = 64
FILL = 256  # requests queued at once to fill the queues
PAYLOAD = b"x" * 220  # a submit of a short chat
LOG_GROWTH = math.log(10_000) / math.log(10)  # what O(log n) may cost from 10 tenants to 10,000


def run(arguments: Sequence[str]) -> Report:
    """Measure. Options: decisions of each point, tenants, models, replicas, batch."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    parser.add_argument("--decisions", type=int, default=600)
    parser.add_argument("--tenants", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 100, 1_000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, infra.valkey_running(Path(folder)) as server:
        return asyncio.run(_measure(server.url, options))


async def _measure(url: str, options: argparse.Namespace) -> Report:
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    goals: list[Goal] = []
    per_decision: dict[tuple[int, int], float] = {}
    for models in options.models:
        for tenants in options.tenants:
            async with _Bench(url, tenants, models) as bench:
                for replicas in options.replicas:
                    for batch in options.batch:
                        name = f"tenants_{tenants}_models_{models}_replicas_{replicas}_batch_{batch}"
                        point = await bench.point(options.decisions, replicas, batch)
                        figures[f"{name}_per_second"] = round(point.per_second)
                        figures[f"{name}_p99_us"] = quantile(point.took_ns, 0.99) // 1000
                        limits[f"{name}_per_second"] = round(point.empty_per_second)
                        limits[f"{name}_by_channel_per_second"] = round(point.empty_by_channel_per_second)
                        share = point.per_second / point.empty_per_second
                        if batch == 1:  # else one empty call stands for many decisions
                            goals.append(Goal.at_least(f"{name}: share of the empty script's rate", 0.5, share))
                        if replicas == 1 and batch == 1:
                            per_decision[(models, tenants)] = 1 / point.per_second
    for models in options.models:
        few, many = (per_decision.get((models, count)) for count in (10, 10_000))
        if few and many:
            what = f"models_{models}: time at 10,000 tenants / time at 10"
            goals.append(Goal.at_most(what, round(LOG_GROWTH, 2), many / few))
    return Report(NAME, figures, limits, goals)


@dataclass(frozen=True, slots=True)
class _Point:
    per_second: float
    empty_per_second: float
    empty_by_channel_per_second: float
    took_ns: list[int]


class _Bench:
    """Queues in which every tenant has one request waiting."""

    def __init__(self, url: str, tenants: int, models: int) -> None:
        self.tenants, self.models = tenants, models
        self.clients = [open_redis(url), open_redis(url)]
        self.stores = [RedisSchedulingStore(each) for each in self.clients]
        self._number = 0
        self.policy = redis_records.policy_argument(Policy())

    async def __aenter__(self) -> "_Bench":
        await cast("Any", self.clients[0].flushall())
        self.empty = await cast("Any", self.clients[0].script_load("return 0"))
        versions = min(self.models, self.tenants)
        left = self.tenants + 4 * (SPARE + versions)  # also for the slots of two replicas
        while left > 0:
            turn = Turn(entries=tuple((self.entry(), ROOM) for _ in range(min(FILL, left))))
            await self.stores[0].turn(POOL, turn, NOW_MS)
            left -= FILL
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.clients:
            await each.aclose()

    def entry(self) -> QueueEntry:
        """The next request, of the next tenant."""
        number = self._number
        self._number += 1
        tenant = number % self.tenants
        version = version_key(f"m{tenant % self.models}", DIGEST)
        ends_ms = NOW_MS + 10**9
        return QueueEntry(
            attempt_id(f"0{number:031d}", 1),
            TenantId(f"tenant-{tenant}"),
            version,
            PriorityClass.STANDARD,
            100,
            100,
            ends_ms,
            payload=PAYLOAD,
        )

    async def point(self, decisions: int, replicas: int, batch: int) -> _Point:
        """Measure turns and empty calls alternately, so that a busy machine disturbs both alike."""
        workers = [_Worker(self, replica, batch) for replica in range(replicas)]
        for worker in workers:
            await worker.fill_slots()
        took: list[int] = []
        spent_ns = empty_ns = by_channel_ns = done = 0
        rounds = max(1, decisions // (replicas * batch))
        for start in range(0, rounds, 10):
            count = min(10, rounds - start)
            begun = perf_counter_ns()
            parts = await asyncio.gather(*(worker.work(count) for worker in workers))
            spent_ns += perf_counter_ns() - begun
            took += [each for part in parts for each in part]
            done += count * replicas * batch
            begun = perf_counter_ns()
            await asyncio.gather(*(worker.idle() for worker in workers))
            empty_ns += perf_counter_ns() - begun
            begun = perf_counter_ns()
            await asyncio.gather(*(worker.idle_by_channel() for worker in workers))
            by_channel_ns += perf_counter_ns() - begun
        for worker in workers:
            await worker.clear_slots()
        return _Point(1e9 * done / spent_ns, 1e9 * done / empty_ns, 1e9 * done / by_channel_ns, took)


class _Worker:
    """One replica with a node of its own, whose slots are always full."""

    def __init__(self, bench: _Bench, replica: int, batch: int) -> None:
        self._bench, self._batch = bench, batch
        self._node = NodeId(f"n{replica}")
        self._store, self._redis = bench.stores[replica], bench.clients[replica]
        self._slots = -(-batch // min(bench.models, bench.tenants))
        self._running: dict[VersionKey, list[AttemptId]] = {}
        self._sent: list[Turn] = []

    async def fill_slots(self) -> None:
        """Give every slot of every model away."""
        for number in range(min(self._bench.models, self._bench.tenants)):
            version = version_key(f"m{number}", DIGEST)
            done = await self._store.turn(POOL, Turn(offers=(self._offer(version),), limit=self._slots), NOW_MS)
            self._running[version] = [ticket.attempt for ticket in done.taken.granted]

    async def clear_slots(self) -> None:
        """End what runs, and queue as many again."""
        for attempts in self._running.values():
            entries = tuple((self._bench.entry(), ROOM) for _ in attempts)
            await self._store.turn(POOL, Turn(tuple(map(_ending, attempts)), entries), NOW_MS)

    async def work(self, rounds: int) -> list[int]:
        """Queue a batch while all slots are busy, then end as many and give their slots away; ns of each decision."""
        took = []
        self._sent = []
        for _ in range(rounds):
            begun = perf_counter_ns()
            entries = tuple((self._bench.entry(), ROOM) for _ in range(self._batch))
            names = [entry.version for entry, _ in entries]
            offers = tuple(map(self._offer, dict.fromkeys(names)))
            arrive = Turn(entries=entries, offers=offers, limit=TAKE_MAX)
            await self._store.turn(POOL, arrive, NOW_MS)
            ended = tuple(_ending(self._running[name].pop(0)) for name in names)
            leave = Turn(ended, (), offers, TAKE_MAX)
            done = await self._store.turn(POOL, leave, NOW_MS)
            for ticket in done.taken.granted:
                self._running[ticket.version].append(ticket.attempt)
            took.append((perf_counter_ns() - begun) // self._batch)
            self._sent += [arrive, leave]
        return took

    async def idle(self) -> None:
        """The same calls, to a script that does nothing."""
        for turn in self._sent:
            arguments = [NOW_MS, self._bench.policy, *redis_records.turn_arguments(turn)]
            await cast("Any", self._redis.evalsha(self._bench.empty, 1, pool_prefix(POOL), *arguments))

    async def idle_by_channel(self) -> None:
        """The same through the scripts' channel."""
        channel = self._redis.scripts
        assert channel is not None, "the server is reached in plain TCP"
        for turn in self._sent:
            arguments = [NOW_MS, self._bench.policy, *redis_records.turn_arguments(turn)]
            await channel.call("EVALSHA", self._bench.empty, 1, pool_prefix(POOL), *arguments)

    def _offer(self, version: VersionKey) -> Offer:
        return Offer(instance_key(self._node, version), version, self._slots, b"p" * 60)


def _ending(attempt: AttemptId) -> Ending:
    return Ending(attempt, Outcome.DONE, Tokens(100, 0, 80), 900)

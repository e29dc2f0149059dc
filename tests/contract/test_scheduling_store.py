"""The Redis store and the in-memory queue decide the same: every verb, every answer, any order (invariants 1 to 5).

Hypothesis drives both with one sequence of commands on virtual time and compares each answer and the state after it.
"""

import asyncio
import itertools
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from roundhouse.errors import Unavailable
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import NodeId, Outcome, PoolName, PriorityClass, TenantId
from services.scheduler.adapters.redis_store import RedisSchedulingStore, pool_prefix
from services.scheduler.domain.lanes import Account
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    LoadClaim,
    LoadFailure,
    Offer,
    Part,
    Progress,
    QueueEntry,
    QueueLimit,
    RefusalReason,
    Room,
    Tokens,
    Turn,
    instance_key,
    version_key,
)
from services.scheduler.domain.residency import ClaimOrder, DrainOrder
from services.scheduler.domain.service import Policy
from tests.fakes.scheduling_store import InMemorySchedulingStore

# Names with separators, so that keys made of them must not collide.
TENANTS = [TenantId("a"), TenantId("a:b"), TenantId("ü|{x}")]
VERSIONS = [version_key("m", "sha256:1"), version_key("m:1", "sha256:1"), version_key("ö@x", "sha256:2", "a-b")]
NODES = [NodeId("n"), NodeId("n:1"), NodeId("é")]
ATTEMPTS = [AttemptId(f"r{number}/1") for number in range(12)]
POLICY = Policy(
    lease_ms=3_000, retry_ms=400, delivery_ms_max=1_500, tombstone_ms=10**9, overload_ms=700, batch_pause_ms=2_000
)
pools = itertools.count()

tokens = st.integers(0, 2_000)
used = st.builds(Tokens, tokens, st.integers(0, 500), tokens)
attempts = st.sampled_from(ATTEMPTS)
versions = st.sampled_from(VERSIONS)
nodes = st.sampled_from(NODES)
instances = st.builds(instance_key, nodes, versions)
warm = st.lists(st.tuples(instances, st.integers(0, 2_000)), max_size=3, unique_by=lambda each: each[0]).map(tuple)
further_queues = st.lists(
    st.builds(QueueLimit, st.sampled_from(["k:1", "k:2", "m:a"]), st.integers(-1, 3), st.sampled_from([0, 1, 900])),
    max_size=2,
    unique_by=lambda each: each.scope,
).map(tuple)
owners = st.sampled_from(["", "", "a-b"])
costs = st.sampled_from([0, 3, 100, 2_000])
offers = st.lists(
    st.tuples(nodes, versions, st.integers(0, 3), st.sampled_from(list(Part)), costs, costs, costs, owners),
    max_size=6,
    unique_by=lambda each: each[:2],
)


class BothStores(RuleBasedStateMachine):
    """One command sequence on two stores."""

    url = ""
    policy = POLICY

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = self.runner.run(self._open())
        self.real = RedisSchedulingStore(self.redis, self.policy)
        self.fake = InMemorySchedulingStore(self.policy)
        self.pool = PoolName(f"pool {next(pools)}}}")
        self.now_ms = 1_800_000_000_000
        self.fresh = 0
        self.running: list[AttemptId] = []

    async def _open(self) -> Any:
        return open_redis(self.url)

    def teardown(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.close()

    def same(self, real: Awaitable[object], fake: Awaitable[object]) -> Any:
        answers = self.runner.run(self._both(real, fake))
        assert answers[0] == answers[1]
        return answers[0]

    async def _both(self, real: Awaitable[object], fake: Awaitable[object]) -> tuple[object, object]:
        return await _outcome(real), await _outcome(fake)

    @rule(milliseconds=st.sampled_from([1, 50, 400, 1_000, 3_000]))
    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule(behind_ms=st.sampled_from([500, 751, 2_000]), version=versions, node=nodes)
    def wake_from_a_freeze(self, behind_ms: int, version: Any, node: NodeId) -> None:
        """A caller whose time is over a quarter of the lease behind gets nothing."""
        these, then_ms = [Offer(instance_key(node, version), version, 2)], self.now_ms - behind_ms
        self.same(self.real.take(self.pool, these, 1, then_ms), self.fake.take(self.pool, these, 1, then_ms))
        claim = ClaimOrder(
            version, LoadClaim(node, "x", then_ms + 1_000, 7), self.fake.queue(self.pool).residency.revision
        )
        self.same(self.real.claim_load(self.pool, claim, then_ms), self.fake.claim_load(self.pool, claim, then_ms))

    @rule(
        attempt=attempts,
        tenant=st.sampled_from(TENANTS),
        version=versions,
        name=st.sampled_from(list(PriorityClass)),
        size=st.tuples(tokens, tokens),
        patience=st.sampled_from([0, 300, 2_000, 2_000, 60_000]),
        weight=st.sampled_from([1, 333, 1_000, 7_000]),
        room=st.builds(
            Room,
            st.integers(0, 4),
            st.integers(0, 3),
            st.sampled_from([0, 0, 500]),
            tokens,
            st.sampled_from([0, 0, 100]),
        ),
        cached=warm,
        queues=further_queues,
    )
    def enqueue(
        self,
        attempt: AttemptId,
        tenant: TenantId,
        version: Any,
        name: PriorityClass,
        size: tuple[int, int],
        patience: int,
        weight: int,
        room: Room,
        cached: Any,
        queues: Any,
    ) -> None:
        payload = attempt.encode() + b"\xff"
        deadline_ms = self.now_ms + patience
        entry = QueueEntry(attempt, tenant, version, name, *size, deadline_ms, weight, payload, cached, queues)
        self.enqueue_one(entry, room)

    @rule(offered=offers, limit=st.integers(1, 4))
    def take(self, offered: list[tuple[Any, ...]], limit: int) -> None:
        these = [
            Offer(instance_key(node, version), version, slots, b"\x00at " + node.encode(), *terms)
            for node, version, slots, *terms in offered
        ]
        self.same(
            self.real.take(self.pool, these, limit, self.now_ms), self.fake.take(self.pool, these, limit, self.now_ms)
        )

    @rule(
        endings=st.lists(
            st.builds(Ending, attempts, st.sampled_from([Outcome.DONE, Outcome.FAILED]), used, st.integers(0, 900)),
            max_size=3,
        )
    )
    def finish(self, endings: list[Ending]) -> None:
        self.same(self.real.finish(self.pool, endings, self.now_ms), self.fake.finish(self.pool, endings, self.now_ms))

    @rule(attempt=attempts)
    def cancel(self, attempt: AttemptId) -> None:
        self.same(self.real.cancel(self.pool, attempt, self.now_ms), self.fake.cancel(self.pool, attempt, self.now_ms))

    @rule(leases=st.lists(st.builds(Progress, attempts, used), max_size=3))
    def renew(self, leases: list[Progress]) -> None:
        self.same(self.real.renew(self.pool, leases, self.now_ms), self.fake.renew(self.pool, leases, self.now_ms))

    @rule()
    def expire(self) -> None:
        self.same(self.real.expire(self.pool, self.now_ms), self.fake.expire(self.pool, self.now_ms))

    @rule(version=versions, ahead=st.sampled_from([0, 1_000, 10**6]))
    def refuse(self, version: Any, ahead: int) -> None:
        arguments = (self.pool, version, self.now_ms + ahead, RefusalReason.UNAVAILABLE, "it broke: ü", self.now_ms)
        self.same(self.real.refuse(*arguments), self.fake.refuse(*arguments))

    @rule()
    def claim_due(self) -> None:
        self.same(self.real.claim_due(self.pool, self.now_ms), self.fake.claim_due(self.pool, self.now_ms))

    @rule(these=st.lists(attempts, max_size=4))
    def acknowledge(self, these: list[AttemptId]) -> None:
        self.same(
            self.real.acknowledge(self.pool, these, self.now_ms), self.fake.acknowledge(self.pool, these, self.now_ms)
        )

    @rule(node=nodes, version=versions, purpose=versions, rotate=st.booleans(), ahead=st.integers(0, 1_500))
    def begin_drain(self, node: NodeId, version: Any, purpose: Any, rotate: bool, ahead: int) -> None:
        order = DrainOrder(instance_key(node, version), version, purpose, self.now_ms + ahead, rotate)
        self.same(
            self.real.begin_drain(self.pool, order, self.now_ms), self.fake.begin_drain(self.pool, order, self.now_ms)
        )

    @rule(purpose=versions, instances=st.lists(st.tuples(nodes, versions), min_size=1, max_size=2, unique=True))
    def send_drains(self, purpose: Any, instances: list[tuple[NodeId, Any]]) -> None:
        keys = [instance_key(node, version) for node, version in instances]
        arguments = (self.pool, purpose, keys, self.now_ms + 900, self.now_ms)
        self.same(self.real.send_drains(*arguments), self.fake.send_drains(*arguments))

    @rule(node=nodes, version=versions, purpose=st.none() | versions)
    def clear_drain(self, node: NodeId, version: Any, purpose: Any) -> None:
        arguments = (self.pool, instance_key(node, version), self.now_ms, purpose)
        self.same(self.real.clear_drain(*arguments), self.fake.clear_drain(*arguments))

    @rule(node=nodes, version=versions, owner=st.sampled_from(["x", "y|"]), old=st.booleans(), gang=st.booleans())
    def claim_load(self, node: NodeId, version: Any, owner: str, old: bool, gang: bool) -> None:
        revision = self.fake.queue(self.pool).residency.revision - old
        order = ClaimOrder(version, LoadClaim(node, owner, self.now_ms + 1_000, 7, (0, 12) if gang else ()), revision)
        self.same(
            self.real.claim_load(self.pool, order, self.now_ms), self.fake.claim_load(self.pool, order, self.now_ms)
        )

    @rule(version=versions, owner=st.sampled_from(["x", "y|"]))
    def renew_load(self, version: Any, owner: str) -> None:
        arguments = (self.pool, version, owner, self.now_ms + 2_000, self.now_ms)
        self.same(self.real.renew_load(*arguments), self.fake.renew_load(*arguments))

    @rule(
        node=nodes,
        version=versions,
        owner=st.sampled_from(["x", "y|"]),
        failure=st.none() | st.just(LoadFailure(1_900_000_000_000, 2, "a|b: ü")),
    )
    def release_load(self, node: NodeId, version: Any, owner: str, failure: LoadFailure | None) -> None:
        arguments = (self.pool, version, node, owner, failure, self.now_ms)
        self.same(self.real.release_load(*arguments), self.fake.release_load(*arguments))

    @rule(
        tenants=st.lists(st.sampled_from(TENANTS), min_size=2, max_size=5),
        version=versions,
        names=st.lists(st.sampled_from(list(PriorityClass)), min_size=5, max_size=5),
        size=st.tuples(tokens, tokens),
        weight=st.sampled_from([333, 1_000, 7_000]),
        cached=warm,
        terms=st.lists(st.tuples(st.sampled_from(list(Part)), costs, costs, costs, owners), min_size=3, max_size=3),
    )
    def burst(
        self,
        tenants: list[TenantId],
        version: Any,
        names: list[PriorityClass],
        size: tuple[int, int],
        weight: int,
        cached: Any,
        terms: list[Any],
    ) -> None:
        """One ends, several patient requests come, three slots are given: one turn."""
        entries = []
        for tenant, name in zip(tenants, names, strict=False):
            self.fresh += 1
            attempt = AttemptId(f"fresh{self.fresh}/1")
            entry = QueueEntry(attempt, tenant, version, name, *size, self.now_ms + 60_000, weight, b"", cached)
            entries.append((entry, Room(50, 3)))
        these = tuple(
            Offer(instance_key(node, version), version, 3, node.encode(), *each)
            for node, each in zip(NODES, terms, strict=True)
        )
        endings = [Ending(attempt, Outcome.DONE, Tokens(*size), 700) for attempt in self.running[:1]]
        turn = Turn(tuple(endings), tuple(entries), these, 3)
        done = self.same(self.real.turn(self.pool, turn, self.now_ms), self.fake.turn(self.pool, turn, self.now_ms))
        self.running = self.running[1:] + [ticket.attempt for ticket in done.taken.granted]

    @rule(how_many=st.integers(1, 4), used=used, run_ms=st.integers(1, 5_000))
    def serve(self, how_many: int, used: Tokens, run_ms: int) -> None:
        """Some running requests end well."""
        done, self.running = self.running[:how_many], self.running[how_many:]
        endings = [Ending(attempt, Outcome.DONE, used, run_ms) for attempt in done]
        self.same(self.real.finish(self.pool, endings, self.now_ms), self.fake.finish(self.pool, endings, self.now_ms))

    def enqueue_one(self, entry: QueueEntry, room: Room) -> None:
        self.same(
            self.real.enqueue(self.pool, entry, room, self.now_ms),
            self.fake.enqueue(self.pool, entry, room, self.now_ms),
        )

    @invariant()
    def same_accounts(self) -> None:
        """Every counter behind the answers is equal, so that no difference stays hidden until later."""
        for version, queues in self.fake.queue(self.pool)._versions.items():
            running, run, output, floor, _, *rest = self.runner.run(self._packed(f"v:{version}")) or [0] * 20
            averages = queues.average_run_milli, queues.average_output_milli
            assert (running, run, output, floor) == (queues.running, *averages, queues.pass_floor_milli)
            by_class = zip(rest[:3], rest[3:6], rest[6:9], rest[9:12], strict=True)
            for number, (numbers, lane) in enumerate(zip(by_class, queues.lanes.values(), strict=True), start=1):
                assert numbers == (lane.pass_milli, lane.waiting, lane.floor_milli, lane.turns)
                accounts = {
                    tenant: _account(account, len(lane.queues.get(tenant, [])))
                    for tenant, account in lane.accounts.items()
                }
                expected = {tenant: account for tenant, account in accounts.items() if any(account)}
                assert self.runner.run(self._packed_fields(f"acc:{number}:{version}")) == expected

    async def _packed(self, name: str, *field: str) -> list[int]:
        """The numbers of a packed value; none = it is not there."""
        script = "local v = redis.call(unpack(ARGV)); return v and {cmsgpack.unpack(v)} or {}"
        verb = ("HGET",) if field else ("GET",)
        return list(await self.redis.eval(script, 0, *verb, pool_prefix(self.pool) + name, *field))

    async def _packed_fields(self, name: str) -> dict[str, list[int]]:
        fields = [key.decode() for key in await self.redis.hkeys(pool_prefix(self.pool) + name)]
        found = {field: await self._packed(name, field) for field in fields}
        return {field: numbers for field, numbers in found.items() if any(numbers)}

    @invariant()
    def same_state(self) -> None:
        depths = self.fake.queue(self.pool)._backlog.queues()
        own = {name: numbers for (name, scope), numbers in depths.items() if not scope}
        further = {
            f"{len(name.encode())}:{name}:{scope}": numbers for (name, scope), numbers in depths.items() if scope
        }
        assert self.runner.run(self._packed_fields("queued")) == own
        assert self.runner.run(self._packed_fields("scoped")) == further
        self.same(self.real.snapshot(self.pool, self.now_ms), self.fake.snapshot(self.pool, self.now_ms))

    @invariant()
    def counts_are_those_of_the_queues(self) -> None:
        """How many wait is kept as numbers; the sorted sets that hold them have as many members (case B46)."""
        expected: dict[str, int] = {}
        for version, queues in self.fake.queue(self.pool)._versions.items():
            for number, lane in enumerate(queues.lanes.values(), start=1):
                expected |= {f"age:{number}:{version}": lane.waiting, f"lane:{number}:{version}": len(lane.queues)}
        assert self.runner.run(self._sizes(list(expected))) == list(expected.values())

    async def _sizes(self, names: list[str]) -> list[int]:
        script = "local n = {}; for i, k in ipairs(ARGV) do n[i] = redis.call('ZCARD', k) end; return n"
        return list(await self.redis.eval(script, 0, *(pool_prefix(self.pool) + name for name in names)))


def _account(account: Account, own: int) -> list[int]:
    """As `acc:` keeps it."""
    averages = [account.average_output_milli, account.average_cost_milli]
    return [account.service_milli, account.epoch, account.turn, *averages, own]


@pytest.mark.parametrize(("device_time", "examples"), [(False, 60), (True, 20)])
def test_redis_decides_as_the_fair_queue_does(redis_url: str, device_time: bool, examples: int) -> None:
    """Any sequence of verbs gets the same answers from Redis and from the pure queue."""
    BothStores.url = redis_url
    BothStores.policy = replace(POLICY, device_time=device_time)
    run_state_machine_as_test(
        BothStores,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


async def _outcome(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except Unavailable as error:
        if error.__cause__ is not None and "STALE" not in str(error.__cause__):
            raise  # a script is broken
        return Unavailable

"""The Redis store by example: rare orders of events, and how long it remembers."""

import pytest

from roundhouse.errors import Unavailable
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import NodeId, Outcome, PoolName, PriorityClass, TenantId
from services.scheduler.adapters.redis_store import RedisSchedulingStore, pool_prefix
from services.scheduler.domain.records import (
    BROKEN,
    AttemptId,
    Ending,
    LoadClaim,
    LoadFailure,
    Offer,
    QueueEntry,
    Room,
    instance_key,
    version_key,
)
from services.scheduler.domain.residency import Claimed, ClaimOrder, DrainOrder
from services.scheduler.domain.service import Policy
from tests.fakes.scheduling_store import InMemorySchedulingStore

VERSION = version_key("m", "sha256:1")
INSTANCE = instance_key(NodeId("n"), VERSION)
POLICY = Policy(lease_ms=3_000)


async def test_both_drop_a_refund_from_before_a_lift(redis_url: str) -> None:
    """Invariant 5: a rare order of events that random sequences seldom meet; after it, who is served next is equal."""
    redis = open_redis(redis_url)
    pool, version = PoolName("p"), VERSION
    room, now_ms = Room(100, 100), 1_800_000_000_000
    offer = [Offer(INSTANCE, version, 100)]

    def entry(name: str, tenant: str) -> QueueEntry:
        return QueueEntry(
            AttemptId(name), TenantId(tenant), version, PriorityClass.STANDARD, 100, 50, now_ms + 60_000, 1_000
        )

    accounts = []
    for store in (RedisSchedulingStore(redis, POLICY), InMemorySchedulingStore(POLICY)):
        await store.enqueue(pool, entry("a1", "a"), room, now_ms)
        await store.take(pool, offer, 1, now_ms)
        for number in range(11):
            await store.enqueue(pool, entry(f"b{number}", "b"), room, now_ms)
        await store.take(pool, offer, 10, now_ms)
        await store.enqueue(pool, entry("a2", "a"), room, now_ms)
        await store.finish(pool, [Ending(AttemptId("a1"), Outcome.FAILED)], now_ms)
        # Lifted to 10 × 200 - 2 × 200 = 1,600 units; without the drop it would be 1,400.
        for number in range(3):
            await store.enqueue(pool, entry(f"a{number + 3}", "a"), room, now_ms)
        accounts.append([t.attempt for t in (await store.take(pool, offer, 4, now_ms)).granted])
    await redis.aclose()
    # a at 1,600 and 1,800 goes first twice; at 2,000 each, b, who was served longer ago; then a.
    assert accounts == [["a2", "a3", "b10", "a4"]] * 2


async def test_what_says_how_much_waits_outlives_it(redis_url: str) -> None:
    """Counts of a lane are not forgotten with its idle accounts: a request may wait longer than a day."""
    redis = open_redis(redis_url)
    pool, version, now_ms, wait_ms = PoolName("patient"), VERSION, 1_800_000_000_000, 5 * 86_400_000
    entry = QueueEntry(AttemptId("a"), TenantId("t"), version, PriorityClass.BATCH, 1, 1, now_ms + wait_ms)
    await RedisSchedulingStore(redis, POLICY).enqueue(pool, entry, Room(9, 0), now_ms)
    left_ms = [await redis.pttl(pool_prefix(pool) + name) for name in (f"v:{version}", f"acc:3:{version}")]
    await redis.aclose()
    assert min(left_ms) > wait_ms


async def test_a_clock_that_was_ahead_stops_nobody_for_longer_than_a_minute(redis_url: str) -> None:
    """One replica's clock was an hour ahead and was set right: until what it said is forgotten the others hear why
    they hand nothing out, then they do. A clock that is set back on a single machine is the same."""
    redis = open_redis(redis_url)
    pool, now_ms, offer = PoolName("clocks"), 1_800_000_000_000, [Offer(INSTANCE, VERSION, 1)]
    store = RedisSchedulingStore(redis, POLICY)
    await store.take(pool, offer, 1, now_ms + 3_600_000)
    with pytest.raises(Unavailable, match="clock"):
        await store.take(pool, offer, 1, now_ms)
    left_ms = await redis.pttl(pool_prefix(pool) + "latest")
    await redis.pexpire(pool_prefix(pool) + "latest", 0)
    assert (await store.take(pool, offer, 1, now_ms)).granted == ()
    await redis.aclose()
    assert 0 < left_ms <= 60_000


async def test_notes_about_what_has_gone_do_not_pile_up(redis_url: str) -> None:
    """Nodes with new names come and go for months. Of more than 1,000 failures, marks and claims those that are void
    are forgotten with the next expiry, in both stores; what is still of use stays."""
    redis = open_redis(redis_url)
    pool, now_ms = PoolName("notes"), 1_800_000_000_000
    states = []
    for store in (RedisSchedulingStore(redis, POLICY), InMemorySchedulingStore(POLICY)):
        for number in range(1_001):
            node, until_ms, other = NodeId(f"n{number}"), now_ms + number, version_key(f"m{number}", "sha256:1")
            await store.release_load(pool, VERSION, node, "s1", LoadFailure(until_ms, 1, "no such file"), now_ms)
            mark = DrainOrder(instance_key(node, VERSION), VERSION, BROKEN, until_ms, True)
            await store.begin_drain(pool, mark, now_ms)
            claim = ClaimOrder(other, LoadClaim(node, "s1", until_ms, 1), revision=3 * number + 2)
            assert await store.claim_load(pool, claim, now_ms) == Claimed()
        await store.expire(pool, now_ms + 999)
        states.append(await store.snapshot(pool, now_ms))
    await redis.aclose()
    assert states[0] == states[1]
    assert (len(states[0].failures), len(states[0].drains), len(states[0].loads)) == (1, 1, 1)

"""Budgets end to end in metering: usage events in, micro-units in the store and alerts on the streams out."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace
from nats.js.api import ConsumerConfig, DeliverPolicy

from roundhouse import subjects
from roundhouse.budgets import budget_key, period_text, spent_field
from roundhouse.catalogue.records import Budget, Tenant
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.event_bus import NatsBus
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import TenantId
from roundhouse.wire.v1 import events_pb2, usage_pb2
from services.metering.domain.usage import UsageFacts
from tests import infra
from tests.builders.usage import abandoned, priced_catalogue, usage_facts
from tests.integration.metering.conftest import MeteringProcess, emit, wait_for

T1 = TenantId("t1")


def now_ms() -> int:
    """Unix time."""
    return int(datetime.now(UTC).timestamp() * 1000)


def month() -> str:
    """The period of now."""
    return period_text("month", now_ms())


def event(name: str, **changes: Any) -> UsageFacts:
    """An event of this instant; 0.00492 of money each, by the arithmetic of `priced_catalogue`."""
    return usage_facts(name, tenant_id="t1", time_ms=now_ms(), **changes)


async def declare(redis_url: str, amount: str) -> None:
    """Give t1 a budget."""
    redis = open_redis(redis_url)
    store = CatalogueStore(redis)
    stored = await store.get()
    generation = stored.catalogue.generation if stored is not None else 0
    tenant = Tenant(name=T1, budget=Budget(amount=amount))
    declared = replace(priced_catalogue(), tenants={T1: tenant}, generation=generation + 1)
    await store.put(declared, expected_generation=generation)
    await redis.aclose()


class Spent:
    """What the store says of t1."""

    def __init__(self, redis_url: str) -> None:
        self.redis = open_redis(redis_url)

    async def micro(self) -> int:
        """Micro-units spent this month."""
        return int(await self.redis.hget(budget_key("t1"), spent_field(month(), "USD")) or 0)  # type: ignore[misc]

    async def reaches(self, wanted: int, *, within_s: float = 30) -> float:
        """Wait for the amount; how long it took, in seconds."""
        began = time.monotonic()
        while (found := await self.micro()) != wanted:
            assert time.monotonic() - began < within_s, f"{found} micro-units, not {wanted}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began


def published(metering: MeteringProcess) -> bool:
    """Whether the billing stream has every row."""
    found = metering.get("/v1/reconcile")
    return bool(found["sequence"] == found["published_sequence"])


async def messages(bus: NatsBus, subject: str, stream: str) -> list[bytes]:
    """What a stream holds under a subject."""
    config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    subscription = await bus.jetstream.subscribe(subject, stream=stream, ordered_consumer=True, config=config)
    found: list[bytes] = []
    try:
        while True:
            found.append((await subscription.next_msg(0.5)).data)
    except TimeoutError:
        return found
    finally:
        await subscription.unsubscribe()


@pytest.fixture
async def spent(redis_url: str) -> AsyncIterator[Spent]:
    """The store, as a gateway reads it."""
    reader = Spent(redis_url)
    yield reader
    await reader.redis.aclose()


@pytest.fixture
async def started(metering: MeteringProcess, redis_url: str) -> MeteringProcess:
    """A metering process, and a budget of 0.0123 for t1: 50% are 0.00615, 80% 0.00984, 100% 0.0123."""
    await declare(redis_url, "0.0123")
    metering.start()
    await asyncio.to_thread(wait_for, metering.ready, within_s=30, what="ready")
    return metering


async def test_spend_reaches_the_gateways_and_each_alert_comes_once(
    started: MeteringProcess, bus: NatsBus, redis_url: str, spent: Spent
) -> None:
    """Three events of 0.00492: 4,920, 9,840 and 14,760 micro-units; alerts at 50 and 80 with the second, 100 with the
    third, once each, also after a kill, a flushed store and a repeated declaration."""
    await emit(bus, event("r1"))
    await spent.reaches(4_920)
    await emit(bus, event("r2"))
    await spent.reaches(9_840)
    await emit(bus, event("r3"))
    await spent.reaches(14_760)
    await asyncio.sleep(0.5)
    started.end(signal.SIGKILL)
    await asyncio.to_thread(infra.flush_redis, redis_url)
    await declare(redis_url, "0.0123")
    started.start()
    await spent.reaches(14_760)
    await declare(redis_url, "0.0123")
    await emit(bus, event("r4"))
    await spent.reaches(19_680)
    told = [usage_pb2.BudgetAlert.FromString(data) for data in await messages(bus, subjects.BUDGET_ALERTS, "BILLING")]
    assert [(alert.tenant_id, alert.period, alert.percent) for alert in told] == [
        ("t1", month(), percent) for percent in (50, 80, 100)
    ]
    assert [(alert.spent, alert.budget, alert.currency) for alert in told][1:] == [
        ("0.00984", "0.0123", "USD"),
        ("0.01476", "0.0123", "USD"),
    ]
    audits = [
        events_pb2.AuditEvent.FromString(data)
        for data in await messages(bus, subjects.audit("budget.alert"), subjects.AUDIT_STREAM)
    ]
    assert [(audit.subject, audit.details["period"]) for audit in audits] == [("t1", month())] * 3
    await asyncio.to_thread(wait_for, lambda: published(started), within_s=30, what="all rows published")
    records = await messages(bus, subjects.BILLING_RECORDS, subjects.BILLING_STREAM)
    assert [usage_pb2.RatedRecord.FromString(data).sequence for data in records] == [1, 2, 3, 4]


async def test_a_correction_replaces_and_reservations_end_with_their_bill(
    started: MeteringProcess, bus: NatsBus, redis_url: str, spent: Spent
) -> None:
    """A scheduler's event of a cut-off attempt counts, the gateway's own replaces it; the reservation of a request is
    given back in the same step in which its cost is counted, that of another request stays."""
    key = budget_key("t1")
    await spent.redis.hset(key, "reserved", "11000")  # type: ignore[misc]
    await spent.redis.hset(f"{key}:amounts", mapping={"r1": 4_000, "r9": 7_000})  # type: ignore[misc]
    await spent.redis.zadd(f"{key}:holds", {"r1": 2**52, "r9": 2**52})
    whole = event("r1")
    cut = abandoned("r1", time_ms=now_ms())
    await emit(bus, cut)
    await spent.reaches(2_670)  # (600 × 3 + 400 × 0.3 + 50 × 15) / 1,000,000
    assert await spent.redis.hget(key, "reserved") == b"7000"  # type: ignore[misc]
    await emit(bus, whole)
    await spent.reaches(4_920)
    assert await spent.redis.hgetall(f"{key}:amounts") == {b"r9": b"7000"}  # type: ignore[misc]

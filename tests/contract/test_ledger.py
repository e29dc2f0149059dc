"""What every ledger does: the fake, SQLite and PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from msgspec.structs import replace

from roundhouse.vocabulary import PriorityClass
from services.metering.adapters.database import ledger_url, open_reader
from services.metering.adapters.schema import ledger_head, metadata
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.domain.ledger import Candidate, RawEvent, Rejected, Result
from services.metering.domain.periods import DAY_MS, HOUR_MS, day_start_ms
from services.metering.domain.queries import Dimension, Totals, UsageFilter
from services.metering.domain.rating import UNRATED
from services.metering.domain.usage import UsageFacts
from services.metering.ports import Ledger
from tests.builders.ledgers import database_url
from tests.builders.usage import AMOUNT, TIME_MS, abandoned, candidate, usage_facts
from tests.fakes.ledger import FakeLedger

NOW_MS = TIME_MS + 60_000
EVERYTHING = UsageFilter()


@pytest.fixture(params=["fake", "sqlite", "postgresql"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    """Each kind of ledger, empty."""
    if request.param == "fake":
        yield FakeLedger()
        return
    real = await SqlLedger.open(database_url(request.param, request, tmp_path))
    yield real
    await real.close()


async def record(ledger: Ledger, *events: UsageFacts) -> list[Result]:
    """Append events rated at `PRICE` in one batch."""
    return list(await ledger.append([candidate(event) for event in events], now_ms=NOW_MS))


async def total(ledger: Ledger, where: UsageFilter = EVERYTHING) -> Totals:
    """The one currency's totals."""
    (totals,) = (await ledger.reconcile(where)).totals
    return totals


async def test_a_row_comes_back_with_every_field(ledger: Ledger) -> None:
    """What was recorded is what is read, with sequence and amount."""
    assert await record(ledger, usage_facts()) == [Result.RECORDED]
    (row,) = (await ledger.rows(EVERYTHING, after=None, limit=10)).rows
    assert (row.facts, row.sequence, row.revision, row.recorded_ms) == (usage_facts(), 1, 0, NOW_MS)
    assert (row.rating.price_id, row.rating.currency, row.rating.amount) == ("p1", "USD", AMOUNT)


async def test_the_same_event_counts_once_in_one_batch_and_in_a_later_one(ledger: Ledger) -> None:
    """A repeat is accepted and adds nothing (invariant 14)."""
    assert await record(ledger, usage_facts(), usage_facts()) == [Result.RECORDED, Result.DUPLICATE]
    assert await record(ledger, usage_facts()) == [Result.DUPLICATE]
    assert (await total(ledger)).attempts == 1


async def test_ids_of_tenants_never_collide_and_a_batch_is_judged_item_by_item(ledger: Ledger) -> None:
    """Case B36: T1 and T2 send one id; T1 repeats it, changes it, and sends it beside a new one."""
    first, second = usage_facts("evt-1"), usage_facts("evt-1", tenant_id="t2")
    assert await record(ledger, first) == [Result.RECORDED]
    assert await record(ledger, second) == [Result.RECORDED]
    assert await record(ledger, first) == [Result.DUPLICATE]
    assert await record(ledger, replace(first, output_tokens=201)) == [Result.QUARANTINED]
    assert await record(ledger, first, usage_facts("evt-2")) == [Result.DUPLICATE, Result.RECORDED]
    totals = await total(ledger)
    assert (totals.attempts, totals.output_tokens) == (3, 3 * 200)
    (entry,) = await ledger.quarantined(limit=10)
    assert entry.reason == "another event of this id is recorded as row 1"


async def test_a_gateways_event_replaces_the_schedulers(ledger: Ledger) -> None:
    """The abandoned row's 50 output tokens give way to the 200 that were streamed: 200, not 250."""
    assert await record(ledger, abandoned()) == [Result.RECORDED]
    assert (await total(ledger)).output_tokens == 50
    assert await record(ledger, usage_facts(), abandoned()) == [Result.SUPERSEDED, Result.DUPLICATE]
    totals = await total(ledger)
    assert (totals.attempts, totals.output_tokens, totals.amount) == (1, 200, AMOUNT)
    (row,) = (await ledger.rows(EVERYTHING, after=None, limit=10)).rows
    assert (row.sequence, row.revision, row.corrects_sequence) == (2, 1, 1)
    assert (await ledger.reconcile(EVERYTHING)).corrections == 1


async def test_a_schedulers_late_event_changes_nothing(ledger: Ledger) -> None:
    """The gateway saw more than the last heartbeat."""
    assert await record(ledger, usage_facts()) == [Result.RECORDED]
    assert await record(ledger, abandoned()) == [Result.DUPLICATE]
    assert (await total(ledger)).output_tokens == 200


async def test_poison_is_kept_once_with_its_reason_and_leaves_when_replayed(ledger: Ledger) -> None:
    """A message that cannot be read is put aside; the same message again is the same entry."""
    poison = Rejected(RawEvent("rh.v1.usage.t1", b"\xff\x00"), "it is not a UsageEvent")
    items: list[Candidate | Rejected] = [poison, candidate(usage_facts()), poison]
    assert await ledger.append(items, now_ms=NOW_MS) == [Result.QUARANTINED, Result.RECORDED, Result.QUARANTINED]
    (entry,) = await ledger.quarantined(limit=10)
    assert (entry.raw, entry.reason, entry.first_seen_ms) == (poison.raw, poison.reason, NOW_MS)
    assert (await ledger.reconcile(EVERYTHING)).quarantined == 1
    assert not await ledger.quarantined(limit=10, after=entry)
    await ledger.mark_replayed(entry.fingerprint, now_ms=NOW_MS)
    assert not await ledger.quarantined(limit=10)


async def test_groups_sum_exactly_by_their_own_time_and_page_in_order(ledger: Ledger) -> None:
    """0.1 + 0.2 is 0.3; an event late by a day stays in its own day; pages of one hold every group once."""
    day = day_start_ms(TIME_MS)
    rated = [candidate(usage_facts(f"r{n}", tenant_id=t, time_ms=at)) for n, (t, at) in enumerate(_spread(day))]
    amounts = [Decimal("0.1"), Decimal("0.2"), Decimal("0.0000000000001"), Decimal(5)]
    items = [replace(c, rating=replace(c.rating, amount=a)) for c, a in zip(rated, amounts, strict=True)]
    await ledger.append(items, now_ms=NOW_MS)
    by = (Dimension.DAY, Dimension.TENANT)
    found: list[tuple[Any, ...]] = []
    after = None
    while True:
        page = await ledger.groups(EVERYTHING, by, after=after, limit=1)
        found += [(*group.key, group.totals.attempts, group.totals.amount) for group in page.groups]
        after = page.next_after
        if after is None:
            break
    assert found == [
        (day - DAY_MS, "t2", "USD", 1, Decimal(5)),
        (day, "Z", "USD", 1, Decimal("0.0000000000001")),
        (day, "t1", "USD", 2, Decimal("0.3")),
    ]


def _spread(day: int) -> list[tuple[str, int]]:
    return [("t1", day), ("t1", day + DAY_MS - 1), ("Z", day + HOUR_MS), ("t2", day - 1)]


@pytest.mark.parametrize("dimension", list(Dimension))
async def test_every_dimension_separates(ledger: Ledger, dimension: Dimension) -> None:
    """Two events that differ in what is grouped by make two groups, else one."""
    change: dict[Dimension, dict[str, Any]] = {
        Dimension.TENANT: {"tenant_id": "t0"},
        Dimension.MODEL: {"model": "m0"},
        Dimension.ADAPTER: {"adapter": ""},
        Dimension.CLASS: {"priority_class": PriorityClass.BATCH},
        Dimension.KEY: {"key_id": "k0"},
        Dimension.DAY: {"time_ms": TIME_MS - DAY_MS},
        Dimension.HOUR: {"time_ms": TIME_MS - HOUR_MS},
    }
    await record(ledger, usage_facts("r1"), usage_facts("r2"), usage_facts("r3", **change[dimension]))
    page = await ledger.groups(EVERYTHING, (dimension,), after=None, limit=10)
    assert [group.totals.attempts for group in page.groups] == [1, 2]


async def test_filters_narrow_and_the_end_of_a_period_is_open(ledger: Ledger) -> None:
    """Each filter alone leaves its own; [from, to) holds from and not to."""
    await record(
        ledger,
        usage_facts("r1"),
        usage_facts("r2", tenant_id="t2"),
        usage_facts("r3", model="m2"),
        usage_facts("r4", key_id="k2", time_ms=TIME_MS + 1),
    )
    assert (await total(ledger, UsageFilter(tenant_id="t2"))).attempts == 1
    assert (await total(ledger, UsageFilter(model="m2"))).attempts == 1
    assert (await total(ledger, UsageFilter(key_id="k2"))).attempts == 1
    assert (await total(ledger, UsageFilter(from_ms=TIME_MS, to_ms=TIME_MS + 1))).attempts == 3
    assert (await total(ledger, UsageFilter(from_ms=TIME_MS + 1))).attempts == 1
    assert (await ledger.reconcile(UsageFilter(tenant_id="nobody"))).totals == ()


async def test_attempts_and_requests_are_counted_apart_and_currencies_never_added(ledger: Ledger) -> None:
    """Two attempts of one request are one request; unrated rows have no currency."""
    again = usage_facts("r1", event_id="r1/2", attempt=2)
    free = replace(candidate(usage_facts("r2")), rating=UNRATED)
    await ledger.append([candidate(usage_facts("r1")), candidate(again), free], now_ms=NOW_MS)
    page = await ledger.groups(EVERYTHING, (), after=None, limit=10)
    counts = [(g.totals.currency, g.totals.requests, g.totals.attempts, g.totals.amount) for g in page.groups]
    assert counts == [("", 1, 1, 0), ("USD", 1, 2, 2 * AMOUNT)]


async def test_rows_page_in_ledger_order(ledger: Ledger) -> None:
    """Pages of two over five rows: 2 + 2 + 1."""
    await record(ledger, *(usage_facts(f"r{n}") for n in range(5)))
    first = await ledger.rows(EVERYTHING, after=None, limit=2)
    second = await ledger.rows(EVERYTHING, after=first.next_after, limit=2)
    third = await ledger.rows(EVERYTHING, after=second.next_after, limit=2)
    pages = [[row.sequence for row in page.rows] for page in (first, second, third)]
    assert (pages, third.next_after) == ([[1, 2], [3, 4], [5]], None)


async def test_the_outbox_gives_rows_in_order_to_one_holder_at_a_time(ledger: Ledger) -> None:
    """Another holder gets nothing until the lease ends; what was marked is not given again."""
    assert not (await ledger.claim_unpublished("a", now_ms=0, lease_ms=10, limit=2)).rows
    await record(ledger, abandoned("r1"), usage_facts("r2"), usage_facts("r1"))
    assert await ledger.unpublished() == 3
    mine = await ledger.claim_unpublished("a", now_ms=0, lease_ms=10, limit=2)
    assert ([row.sequence for row in mine.rows], mine.turn) == ([1, 2], 0)
    assert not (await ledger.claim_unpublished("b", now_ms=9, lease_ms=10, limit=2)).rows
    await ledger.mark_published("a", sequence=2, turn=0)
    await ledger.mark_published("b", sequence=3, turn=0)
    await ledger.mark_published("a", sequence=1, turn=0)
    theirs = await ledger.claim_unpublished("b", now_ms=10, lease_ms=10, limit=2)
    assert [(row.sequence, row.corrects_sequence) for row in theirs.rows] == [(3, 1)]
    await ledger.mark_published("b", sequence=3, turn=0)
    assert await ledger.unpublished() == 0


async def test_publishing_again_counts_whatever_an_earlier_turn_still_marks(ledger: Ledger) -> None:
    """Row 2 was under way when rows were to be published again: marking it in the old turn does not skip row 1."""
    await record(ledger, usage_facts("r1"), usage_facts("r2"))
    assert len((await ledger.claim_unpublished("a", now_ms=0, lease_ms=10, limit=1)).rows) == 1
    await ledger.mark_published("a", sequence=1, turn=0)
    assert len((await ledger.claim_unpublished("a", now_ms=0, lease_ms=10, limit=1)).rows) == 1
    assert await ledger.publish_again(after=0) == 1
    await ledger.mark_published("a", sequence=2, turn=0)
    again = await ledger.claim_unpublished("a", now_ms=0, lease_ms=10, limit=9)
    assert ([row.sequence for row in again.rows], again.turn) == ([1, 2], 1)
    await ledger.mark_published("a", sequence=2, turn=1)
    assert await ledger.unpublished() == 0


async def test_concurrent_batches_leave_no_gap_and_count_each_event_once(ledger: Ledger) -> None:
    """Eight batches of the same ten events at once: ten rows, sequences 1 to 10."""
    events = [usage_facts(f"r{n}") for n in range(10)]
    await asyncio.gather(*(record(ledger, *events) for _ in range(8)))
    page = await ledger.rows(EVERYTHING, after=None, limit=100)
    assert [row.sequence for row in page.rows] == list(range(1, 11))


@pytest.fixture(params=["sqlite", "postgresql"])
def sql_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database of each kind."""
    return database_url(request.param, request, tmp_path)


async def test_two_processes_share_one_ledger(sql_url: str) -> None:
    """Both migrate at once; both record; no event twice, no gap."""
    one, two = await asyncio.gather(SqlLedger.open(sql_url), SqlLedger.open(sql_url))
    events = [usage_facts(f"r{n}") for n in range(20)]
    await asyncio.gather(*(record(ledger, *events[n % 3 :]) for n in range(6) for ledger in (one, two)))
    page = await two.rows(EVERYTHING, after=None, limit=100)
    assert [row.sequence for row in page.rows] == list(range(1, 21))
    await one.close()
    await two.close()


async def test_migrations_make_the_tables_that_the_queries_expect(sql_url: str) -> None:
    """The schema in code and the migrated one are the same; opening again changes nothing."""
    for _ in range(2):
        await (await SqlLedger.open(sql_url)).close()
    engine = open_reader(ledger_url(sql_url))
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), metadata)
        heads = connection.execute(ledger_head.select()).all()
    engine.dispose()
    assert (differences, len(heads)) == ([], 1)

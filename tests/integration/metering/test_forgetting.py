"""Erasure and retention: what goes, what stays, and that nothing that comes afterwards counts twice. Both databases."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from roundhouse import subjects
from roundhouse.catalogue.records import Catalogue, Tenant
from roundhouse.event_bus import NatsBus
from roundhouse.vocabulary import TenantId
from services.metering.adapters.schema import metadata
from services.metering.adapters.signing import PeriodSigner, signature_holds
from services.metering.adapters.sql_accounts import SqlAccounts
from services.metering.adapters.sql_erasure import SqlForgetting
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.stream_erasure import JetStreamErasure
from services.metering.adapters.usage_stream import JetStreamUsage
from services.metering.domain.ledger import RawEvent, Rejected, Result
from services.metering.domain.periods import DAY_MS, month_start_ms, next_month_ms
from services.metering.domain.queries import Dimension, UsageFilter
from services.metering.domain.statements import differences
from services.metering.operations.forgetting import Retention
from tests.builders.ledgers import database_url
from tests.builders.usage import TIME_MS, abandoned, candidate, usage_facts
from tests.fakes.clock import ManualClock
from tests.fakes.prices import SetCatalogue
from tests.integration.metering.conftest import emit

JANUARY_MS = month_start_ms(TIME_MS)
NOW_MS = next_month_ms(JANUARY_MS) + 3 * DAY_MS


@pytest.fixture(params=["sqlite", "postgresql"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlLedger]:
    """An empty ledger of each kind."""
    opened = await SqlLedger.open(database_url(str(request.param), request, tmp_path))
    yield opened
    await opened.close()


def accounts_of(ledger: SqlLedger, folder: Path) -> SqlAccounts:
    """Its accounts, with a key."""
    return SqlAccounts(ledger.database, cluster="test", sign=PeriodSigner(folder / "key.pem").sign)


async def names_in(ledger: SqlLedger, name: str) -> list[str]:
    """Every table in which a text stands anywhere."""

    def look(connection: object) -> list[str]:
        found = []
        for table in metadata.sorted_tables:
            rows = connection.execute(select(table)).all()  # type: ignore[attr-defined]
            if any(name in str(value) for row in rows for value in row):
                found.append(table.name)
        return found

    return await ledger.database.read("look", look)


async def test_an_erased_tenant_is_nowhere_and_its_sums_are_where_they_were(ledger: SqlLedger, tmp_path: Path) -> None:
    """Tables, keys and adapters; totals by model and month as before; the signed month holds; repeats count nothing."""
    accounts = accounts_of(ledger, tmp_path)
    secret = {"tenant_id": "secret-corp", "key_id": "key-of-secret-corp", "adapter": "secret-corp-tuned"}
    mine = [
        usage_facts("r1", **secret),
        abandoned("r2", **secret),
        usage_facts("r3", **secret | {"key_id": "secret-corp-2"}),
    ]
    await ledger.append([*map(candidate, mine), candidate(usage_facts("other"))], now_ms=1)
    await ledger.append([Rejected(RawEvent(subjects.usage("secret-corp"), b"secret-corp"), "poison")], now_ms=1)
    closed = await accounts.close(JANUARY_MS, now_ms=NOW_MS)
    before = await ledger.groups(UsageFilter(), (Dimension.MODEL, Dimension.HOUR), after=None, limit=9)
    assert await names_in(ledger, "secret-corp")

    forgetting = SqlForgetting(ledger.database)
    erased = await forgetting.erase("secret-corp", now_ms=NOW_MS)
    assert erased.rows == 3
    assert await ledger.erased({"secret-corp", erased.pseudonym, "t1"}) == {"secret-corp", erased.pseudonym}
    assert await names_in(ledger, "secret-corp") == []
    assert await ledger.groups(UsageFilter(), (Dimension.MODEL, Dimension.HOUR), after=None, limit=9) == before
    assert differences(closed, await accounts.sums(JANUARY_MS)) == []
    assert signature_holds(closed.document, closed.signature, closed.public_key)
    assert f'"{erased.pseudonym}"' in closed.document

    again = await ledger.append([*map(candidate, mine), candidate(usage_facts("r2", **secret))], now_ms=2)
    assert again == [Result.DUPLICATE, Result.DUPLICATE, Result.DUPLICATE, Result.SUPERSEDED]
    assert await names_in(ledger, "secret-corp") == []
    assert (await forgetting.erase("secret-corp", now_ms=NOW_MS)).pseudonym == erased.pseudonym
    assert differences(closed, await accounts.sums(JANUARY_MS)) == []


async def test_old_requests_go_and_their_sums_stay(ledger: SqlLedger, tmp_path: Path) -> None:
    """30 days for t1: its rows of January go once the month is closed and published; t2 keeps its own; sums stay."""
    accounts = accounts_of(ledger, tmp_path)
    tenants = {
        name: Tenant(name=name, usage_retention_days=days)
        for name, days in ((TenantId("t1"), 30), (TenantId("t2"), None))
    }
    clock = ManualClock(JANUARY_MS + 60 * DAY_MS)
    catalogue = SetCatalogue(Catalogue(generation=1, tenants=tenants))
    retention = Retention(SqlForgetting(ledger.database), catalogue, clock)
    events = [usage_facts("r1"), usage_facts("r2", tenant_id="t2"), usage_facts("new", time_ms=clock.now_ms())]
    await ledger.append([candidate(event) for event in events], now_ms=1)

    async def kept() -> list[str]:
        return [row.facts.request_id for row in (await ledger.rows(UsageFilter(), after=None, limit=9)).rows]

    await retention.turn()
    assert await kept() == ["r1", "r2", "new"], "the month is open"
    closed = await accounts.close(JANUARY_MS, now_ms=clock.now_ms())
    await retention.turn()
    assert await kept() == ["r1", "r2", "new"], "the stream does not have them yet"
    await ledger.claim_unpublished("a", now_ms=0, lease_ms=1, limit=9)
    await ledger.mark_published("a", sequence=3, turn=0)
    before = await ledger.groups(UsageFilter(), (Dimension.TENANT, Dimension.DAY), after=None, limit=9)
    await retention.turn()
    assert await kept() == ["r2", "new"]
    assert await ledger.groups(UsageFilter(), (Dimension.TENANT, Dimension.DAY), after=None, limit=9) == before
    assert differences(closed, await accounts.sums(JANUARY_MS)) == []
    assert await ledger.append([candidate(usage_facts("r1"))], now_ms=2) == [Result.QUARANTINED]
    (entry,) = await ledger.quarantined(limit=9)
    assert "older than what is retained" in entry.reason


async def test_a_late_bill_of_an_open_month_is_no_suspected_repeat(ledger: SqlLedger, tmp_path: Path) -> None:
    """A day's retention on the 20th of February: January is closed and its row is removed, February's from the 2nd is
    still there, whatever its age. So an event of the 3rd that comes now, from a gateway that was down for two weeks, is
    recorded, and a repeat of the 2nd's is known as one; only January's cannot be told from a repeat."""
    day = {n: JANUARY_MS + (30 + n) * DAY_MS for n in (2, 3)}  # of February
    clock = ManualClock(JANUARY_MS + 50 * DAY_MS)
    tenants = {TenantId("t1"): Tenant(name=TenantId("t1"), usage_retention_days=1)}
    retention = Retention(SqlForgetting(ledger.database), SetCatalogue(Catalogue(generation=1, tenants=tenants)), clock)
    await ledger.append([candidate(usage_facts("r1")), candidate(usage_facts("r2", time_ms=day[2]))], now_ms=1)
    await retention.turn()
    assert await ledger.append([candidate(usage_facts("r3", time_ms=day[3]))], now_ms=2) == [Result.RECORDED]
    await accounts_of(ledger, tmp_path).close(JANUARY_MS, now_ms=clock.now_ms())
    claimed = await ledger.claim_unpublished("a", now_ms=0, lease_ms=1, limit=9)
    await ledger.mark_published("a", sequence=3, turn=claimed.turn)
    await retention.turn()
    events = [usage_facts("r1"), usage_facts("r2", time_ms=day[2]), usage_facts("r4", time_ms=day[3])]
    results = await ledger.append([candidate(event) for event in events], now_ms=3)
    assert results == [Result.QUARANTINED, Result.DUPLICATE, Result.RECORDED]


async def test_the_streams_forget_what_is_recorded_and_nothing_else(bus: NatsBus) -> None:
    """t1's acknowledged event and its record go; its event under way, and t2's, stay."""
    for stream in (subjects.USAGE_STREAM, subjects.BILLING_STREAM):
        await bus.jetstream.purge_stream(stream)
    usage = JetStreamUsage(bus)
    await emit(bus, usage_facts("r1"), usage_facts("r2", tenant_id="t2"))
    got = await usage.pull(limit=9)
    while len(got) < 2:
        got = [*got, *await usage.pull(limit=9)]
    await usage.acknowledge(got)
    await emit(bus, usage_facts("on its way"))
    await bus.publish_durable(subjects.billing("t1"), b"x", message_id="b1")
    await bus.publish_durable(subjects.billing("t2"), b"y", message_id="b2")
    await JetStreamErasure(bus).erase("t1")
    counts = [
        (await bus.jetstream.stream_info(name, subjects_filter=">")).state.subjects
        for name in (subjects.USAGE_STREAM, subjects.BILLING_STREAM)
    ]
    assert counts == [{subjects.usage("t1"): 1, subjects.usage("t2"): 1}, {subjects.billing("t2"): 1}]
    await usage.close()

"""A ledger of the first version, with rows in it, is brought up to date and says what it said before."""

from decimal import Decimal
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Column, Connection, MetaData, Numeric, Table, Text, insert

from services.metering.adapters import database
from services.metering.adapters.database import ledger_url, open_writer
from services.metering.adapters.sql_accounts import SqlAccounts
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.domain.periods import month_start_ms, next_month_ms
from services.metering.domain.queries import Dimension, UsageFilter
from tests.builders.ledgers import database_url

JANUARY_MS = 1_767_225_600_000
_EMPTY = ("key_id", "model_digest", "adapter", "adapter_digest", "finish_reason", "counted_by", "node_id", "operation")
_ZERO = ("status", "queue_ms", "stage_ms", "load_ms", "first_token_ms", "total_ms", "run_ms", "recorded_ms")


def first_version(url: str) -> None:
    """Version 1 with a row at the last millisecond of January, and one of March that a correction replaces."""
    engine = open_writer(ledger_url(url))
    with engine.begin() as connection:
        config = Config()
        folder = Path(__file__).resolve().parents[3] / "services" / "metering" / "adapters" / "migrations"
        config.set_main_option("script_location", str(folder))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        last_of_january = next_month_ms(JANUARY_MS) - 1
        march = next_month_ms(next_month_ms(JANUARY_MS)) + 5
        _add(connection, 1, "r1/1", last_of_january, "0.1")
        _add(connection, 2, "r2/1", march, "0.2", superseded_by=3)
        _add(connection, 3, "r2/1", march, "0.4", revision=1, corrects_sequence=2)
        connection.exec_driver_sql("UPDATE ledger_head SET sequence = 3")
    engine.dispose()


def _add(connection: Connection, sequence: int, event_id: str, time_ms: int, amount: str, **more: object) -> None:
    values: dict[str, object] = {
        **dict.fromkeys(_EMPTY, ""),
        **dict.fromkeys(_ZERO, 0),
        "sequence": sequence,
        "revision": 0,
        "event_id": event_id,
        "tenant_id": "t1",
        "source": "s",
        "request_id": event_id,
        "model": "m1",
        "priority_class": "standard",
        "outcome": "done",
        "emitter": "gateway",
        "time_ms": time_ms,
        "attempt": 1,
        "input_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 5,
        "price_id": "p",
        "currency": "USD",
        "amount": Decimal(amount),
        **more,
    }
    exact = Text() if connection.dialect.name == "sqlite" else Numeric()
    if connection.dialect.name == "sqlite":
        values["amount"] = amount
    columns: list[Column[object]] = [Column(name, exact) if name == "amount" else Column(name) for name in values]
    connection.execute(insert(Table("usage_rows", MetaData(), *columns)).values(values))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_rows_of_the_first_version_are_booked_in_the_month_of_their_own_time(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """January keeps its last millisecond; March has the correction alone: 0.2 − 0.2 + 0.4."""
    url = database_url(kind, request, tmp_path)
    first_version(url)
    ledger = await SqlLedger.open(url)
    page = await ledger.groups(UsageFilter(), (Dimension.MODEL,), after=None, limit=9)
    assert [(group.totals.requests, group.totals.amount) for group in page.groups] == [(2, Decimal("0.5"))]
    accounts = SqlAccounts(ledger.database, cluster="test", sign=lambda _: ("s", "k"))
    march = month_start_ms(next_month_ms(next_month_ms(JANUARY_MS)))
    booked = [[sums.amount for _, sums in await accounts.sums(month)] for month in (JANUARY_MS, march)]
    assert booked == [[Decimal("0.1")], [Decimal("0.4")]]
    rows = (await ledger.rows(UsageFilter(), after=None, limit=9)).rows
    assert [(row.kind, row.reversal_ms) for row in rows] == [("usage", None), ("supersedes", march)]
    await ledger.close()


async def test_a_migration_takes_the_time_that_it_needs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index over a large ledger takes longer than any query may: the limit on statements (here 0.2 s) is not one on
    migrations, which would fail at every start for ever. It holds again for what comes after them."""
    upgrade = command.upgrade

    def slow(config: Config, revision: str) -> None:
        config.attributes["connection"].exec_driver_sql("SELECT pg_sleep(0.5)")
        upgrade(config, revision)

    monkeypatch.setattr(database, "STATEMENT_TIMEOUT_MS", 200)
    monkeypatch.setattr(command, "upgrade", slow)
    ledger = await SqlLedger.open(database_url("postgresql", request, tmp_path))
    limit: str = await ledger.database.write(
        "ask", lambda each: each.exec_driver_sql("SHOW statement_timeout").scalar_one()
    )
    assert limit == "200ms"
    await ledger.close()

"""`Entries` in SQL: the books of one period in ledger order, a page at a time."""

from typing import Any

from sqlalchemy import Connection, or_, select

from services.metering.adapters.row_mapping import READ, ledger_row
from services.metering.adapters.schema import ledger_head, usage_rows
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_ledger import with_credits
from services.metering.domain.ledger import Entry, LedgerRow
from services.metering.money_ports import EntryPage, EntryQuery

_columns = usage_rows.c


class SqlEntries:
    """See `ports.Entries`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def head(self) -> int:
        """See `Entries.head`."""
        return await self._database.read("head", lambda c: int(c.execute(select(ledger_head.c.sequence)).scalar_one()))

    async def page(self, query: EntryQuery) -> EntryPage:
        """See `Entries.page`."""
        return await self._database.read("entries", lambda connection: _page(connection, query))


def _page(connection: Connection, query: EntryQuery) -> EntryPage:
    booked = or_(_columns.period_ms == query.period_ms, _columns.reversal_ms == query.period_ms)
    statement = select(*READ).where(booked, _columns.sequence > query.after, _columns.sequence <= query.upto)
    if query.tenant_id is not None:
        statement = statement.where(_columns.tenant_id == query.tenant_id)
    found = connection.execute(statement.order_by(_columns.sequence).limit(query.limit))
    rows = with_credits(connection, [ledger_row(row) for row in found])
    replaced = _by_sequence(connection, [row.corrects_sequence for row in rows if row.reversal_ms == query.period_ms])
    entries: list[Entry] = []
    for row in rows:
        if row.reversal_ms == query.period_ms and row.corrects_sequence in replaced:
            entries.append(Entry(replaced[row.corrects_sequence], by_sequence=row.sequence))
        if row.period_ms == query.period_ms:
            entries.append(Entry(row))
    return EntryPage(tuple(entries), rows[-1].sequence if len(rows) == query.limit else None)


def _by_sequence(connection: Connection, sequences: list[Any]) -> dict[int, LedgerRow]:
    if not sequences:
        return {}
    found = connection.execute(select(*READ).where(_columns.sequence.in_(sequences)))
    return {row.sequence: row for row in map(ledger_row, found)}

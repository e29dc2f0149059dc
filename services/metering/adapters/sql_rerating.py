"""`Rerating` in SQL: one transaction a page, which holds the head while it reads, decides and writes."""

from sqlalchemy import Connection, select

from services.metering.adapters.row_mapping import READ, ledger_row
from services.metering.adapters.schema import usage_rows
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_ledger import lock_head, write_plan
from services.metering.domain.forgetting import is_pseudonym
from services.metering.domain.ledger import Books, LedgerRow, plan_rerating
from services.metering.domain.prices import PriceBook
from services.metering.domain.rating import Rating, rate
from services.metering.money_ports import RatingPage, Rerated


class SqlRerating:
    """See `ports.Rerating`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def rerate(self, page: RatingPage, book: PriceBook, *, now_ms: int) -> Rerated:
        """See `Rerating.rerate`."""
        return await self._database.write("rerate", lambda connection: _rerate(connection, page, book, now_ms))


def _rerate(connection: Connection, page: RatingPage, book: PriceBook, now_ms: int) -> Rerated:
    head = connection.execute(lock_head).one()
    found = _rows(connection, page)
    anew = [(row, _rating(row, book)) for row in found if not is_pseudonym(row.facts.tenant_id)]
    changes = tuple((row.rating, rating) for row, rating in anew if rating != row.rating)
    if changes and not page.dry_run:
        write_plan(connection, plan_rerating(anew, Books(head.sequence, head.open_from_ms), now_ms=now_ms), now_ms)
    return Rerated(len(found), changes, found[-1].sequence if len(found) == page.limit else None)


def _rows(connection: Connection, page: RatingPage) -> list[LedgerRow]:
    columns = usage_rows.c
    statement = (
        select(*READ)
        .where(columns.superseded_by.is_(None), columns.sequence > page.after)
        .where(columns.time_ms >= page.from_ms, columns.time_ms < page.to_ms)
        .order_by(columns.sequence)
        .limit(page.limit)
    )
    return [ledger_row(row) for row in connection.execute(statement)]


def _rating(row: LedgerRow, book: PriceBook) -> Rating:
    rule = book.rule_for(row.facts)
    return rate(row.facts, None if rule is None else rule.price)

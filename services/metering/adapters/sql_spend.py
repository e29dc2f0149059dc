"""`SpendLedger` in SQL: what rows do to budgets, and the sums as of one instant."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, select

from roundhouse.budgets import period_text
from services.metering.adapters.schema import exact_sum, ledger_head, usage_rows
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.domain.budgets import NO_SCOPES, Charge, PeriodKey, Scopes, SpendRow, SpendSums, add_sum
from services.metering.domain.periods import DAY_MS, day_start_ms, month_start_ms
from services.metering.ports import SpendPage

_rows: Final = usage_rows.c
_replaced: Final = usage_rows.alias("replaced")
_following: Final = (
    select(
        _rows.sequence,
        _rows.tenant_id,
        _rows.request_id,
        _rows.key_id,
        _rows.model,
        _rows.adapter,
        _rows.time_ms,
        _rows.currency,
        _rows.amount,
        _replaced.c.time_ms.label("replaced_ms"),
        _replaced.c.currency.label("replaced_currency"),
        _replaced.c.amount.label("replaced_amount"),
    )
    .select_from(usage_rows.outerjoin(_replaced, _rows.corrects_sequence == _replaced.c.sequence))
    .order_by(_rows.sequence)
)
_head: Final = select(ledger_head.c.sequence)


class SqlSpend:
    """See `ports.SpendLedger`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def following(self, sequence: int, *, limit: int) -> SpendPage:
        """See `SpendLedger.following`."""
        return await self._database.read("spend", lambda connection: _page(connection, sequence, limit))

    async def sums(self, now_ms: int, scopes: Scopes = NO_SCOPES) -> tuple[int, SpendSums]:
        """See `SpendLedger.sums`. O(rows of the month)."""
        return await self._database.read("sum spend", lambda connection: _sums(connection, now_ms, scopes))


def _page(connection: Connection, sequence: int, limit: int) -> SpendPage:
    head: int = connection.execute(_head).scalar_one()
    if head <= sequence:
        return SpendPage(head, ())
    found = connection.execute(_following.where(_rows.sequence > sequence).limit(limit))
    return SpendPage(head, tuple(_spend_row(row) for row in found))


def _spend_row(row: Row[Any]) -> SpendRow:
    replaced = None
    if row.replaced_amount is not None:
        replaced = Charge(row.replaced_ms, row.replaced_currency, row.replaced_amount)
    charge = Charge(row.time_ms, row.currency, row.amount)
    return SpendRow(row.sequence, row.tenant_id, row.request_id, charge, replaced, row.key_id, row.adapter or row.model)


def _sums(connection: Connection, now_ms: int, scopes: Scopes) -> tuple[int, SpendSums]:
    head: int = connection.execute(_head).scalar_one()
    sums: SpendSums = {}
    month_ms, day_ms = month_start_ms(now_ms), day_start_ms(now_ms)
    for kind, from_ms in (("month", month_ms), ("day", day_ms)):
        # What is stamped ahead of our clock belongs to later periods, which are counted when they come.
        to_ms = day_ms + DAY_MS if kind == "day" else month_start_ms(month_ms + 31 * DAY_MS)
        for row in _totals(connection, from_ms, to_ms):
            for scope in scopes.of(row.tenant_id, row.key_id, row.adapter or row.model):
                key = PeriodKey(row.tenant_id, period_text(kind, from_ms), row.currency, scope)
                add_sum(sums, key, row.amount)
    return head, sums


def _totals(connection: Connection, from_ms: int, to_ms: int) -> Sequence[Row[Any]]:
    groups = (_rows.tenant_id, _rows.currency, _rows.key_id, _rows.model, _rows.adapter)
    statement = (
        select(*groups, exact_sum(_rows.amount).label("amount"))
        .where(and_(_rows.time_ms >= from_ms, _rows.time_ms < to_ms, _rows.superseded_by.is_(None)))
        .group_by(*groups)
    )
    return connection.execute(statement).all()

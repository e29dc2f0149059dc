"""Accounting periods in SQL: sums of a period, closing it, statements. See `ports.Accounts`.

Closing is one transaction that holds the head: what is folded, summed, signed and written is the state of one instant,
and every row after it books elsewhere.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Row, func, insert, literal_column, select, update

from roundhouse.errors import Conflict
from services.metering.adapters.schema import ONLY_ROW, exact_sum, ledger_head
from services.metering.adapters.schema_accounts import HOUR_SUMS, closed_periods, tenant_pseudonyms, usage_hours
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_ledger import lock_head
from services.metering.adapters.sql_rollup import fold
from services.metering.domain.forgetting import PSEUDONYM_MARK, is_pseudonym
from services.metering.domain.periods import DAY_MS, month_start_ms, month_text, next_month_ms
from services.metering.domain.statements import ClosedPeriod, Closing, Line, Statement, Sums, document_of

_PSEUDONYM_BYTES: Final = 16  # chance enough that two never meet
_columns = usage_hours.c
_SUMS: Final = (
    *(func.sum(_columns[name]).label(name) for name in HOUR_SUMS),
    exact_sum(_columns.amount).label("amount"),
)

Sign = Callable[[str], tuple[str, str]]


class SqlAccounts:
    """See `ports.Accounts`."""

    def __init__(self, database: SqlDatabase, *, cluster: str, sign: Sign) -> None:
        self._database = database
        self._cluster = cluster
        self._sign = sign

    async def close(self, period_ms: int, *, now_ms: int) -> ClosedPeriod:
        """See `Accounts.close`."""
        return await self._database.write(
            "close a period", lambda connection: self._close(connection, period_ms, now_ms)
        )

    async def closed(self) -> Sequence[ClosedPeriod]:
        """See `Accounts.closed`."""
        return await self._database.read("read periods", _closed)

    async def sums(self, period_ms: int) -> Sequence[tuple[str, Sums]]:
        """See `Accounts.sums`."""
        return await self._database.write("sum a period", lambda connection: _folded_sums(connection, period_ms))

    async def statement(self, tenant_id: str, period_ms: int) -> Statement:
        """See `Accounts.statement`."""
        return await self._database.write("statement", lambda connection: _statement(connection, tenant_id, period_ms))

    async def tenants(self, period_ms: int) -> Sequence[str]:
        """See `Accounts.tenants`."""
        return await self._database.write("tenants", lambda connection: _tenants(connection, period_ms))

    def _close(self, connection: Connection, period_ms: int, now_ms: int) -> ClosedPeriod:
        head = connection.execute(lock_head).one()
        known = connection.execute(select(closed_periods).where(closed_periods.c.period_ms == period_ms)).first()
        if known is not None:
            return _closed_period(known)
        _check_closable(connection, period_ms, head.open_from_ms, now_ms)
        fold_all(connection)
        by_tenant = _named(connection, _period_sums(connection, period_ms))
        document = document_of(Closing(self._cluster, period_ms, now_ms, head.sequence, tuple(by_tenant)))
        signature, public_key = self._sign(document)
        closed = ClosedPeriod(period_ms, head.sequence, now_ms, document, signature, public_key)
        columns = {name: getattr(closed, name) for name in ClosedPeriod.__dataclass_fields__}
        connection.execute(insert(closed_periods).values(columns))
        opened = {"open_from_ms": next_month_ms(period_ms)}
        connection.execute(update(ledger_head).where(ledger_head.c.id == ONLY_ROW).values(opened))
        return closed


def _check_closable(connection: Connection, period_ms: int, open_from_ms: int, now_ms: int) -> None:
    if now_ms < next_month_ms(period_ms):
        raise Conflict(f"{month_text(period_ms)} is not over yet")
    if period_ms < open_from_ms:
        raise Conflict(f"a later month than {month_text(period_ms)} is closed already; nothing was booked in this one")
    fold_all(connection)
    earlier = select(func.min(_columns.period_ms)).where(_columns.period_ms < period_ms)
    first: int | None = connection.execute(earlier.where(_columns.period_ms >= open_from_ms)).scalar_one()
    if first is not None:
        raise Conflict(f"months are closed in order: {month_text(first)} is still open")


def fold_all(connection: Connection) -> None:
    while fold(connection, least=1):
        pass


def _period_sums(connection: Connection, period_ms: int) -> list[tuple[str, Sums]]:
    keys = (_columns.tenant_id, _columns.currency)
    statement = select(*keys, *_SUMS).where(_columns.period_ms == period_ms).group_by(*keys).order_by(*keys)
    found = [(row.tenant_id, _sums(row)) for row in connection.execute(statement)]
    return [(tenant, sums) for tenant, sums in found if not _is_empty(sums)]


def _is_empty(sums: Sums) -> bool:
    return not sums.attempts and not sums.amount and not sums.input_tokens and not sums.output_tokens


def _folded_sums(connection: Connection, period_ms: int) -> list[tuple[str, Sums]]:
    connection.execute(lock_head)
    fold_all(connection)
    return _named(connection, _period_sums(connection, period_ms))


def _named(connection: Connection, found: Sequence[tuple[str, Sums]]) -> list[tuple[str, Sums]]:
    names = {tenant: pseudonym_of(connection, tenant) for tenant, _ in found}
    return sorted(((names[tenant], sums) for tenant, sums in found), key=lambda item: (item[0], item[1].currency))


def pseudonym_of(connection: Connection, tenant_id: str) -> str:
    """A tenant's pseudonym, made if it has none; the name itself if it is one already. Call it with the head locked."""
    if is_pseudonym(tenant_id):
        return tenant_id
    known = select(tenant_pseudonyms.c.pseudonym).where(tenant_pseudonyms.c.tenant_id == tenant_id)
    pseudonym: str | None = connection.execute(known).scalar_one_or_none()
    if pseudonym is None:
        pseudonym = PSEUDONYM_MARK + secrets.token_hex(_PSEUDONYM_BYTES)
        connection.execute(insert(tenant_pseudonyms).values(tenant_id=tenant_id, pseudonym=pseudonym))
    return pseudonym


def _statement(connection: Connection, tenant_id: str, period_ms: int) -> Statement:
    head = connection.execute(lock_head).one()
    fold_all(connection)
    lines = _lines(connection, tenant_id, period_ms)
    closed = connection.execute(select(closed_periods).where(closed_periods.c.period_ms == period_ms)).first()
    return Statement(
        tenant_id=tenant_id,
        period_ms=period_ms,
        closed_ms=None if closed is None else closed.closed_ms,
        sequence=head.sequence if closed is None else closed.sequence,
        pseudonym="" if closed is None else pseudonym_of(connection, tenant_id),
        lines=tuple(lines),
    )


def _lines(connection: Connection, tenant_id: str, period_ms: int) -> list[Line]:
    day = _columns.hour_ms - _columns.hour_ms % literal_column(str(DAY_MS))
    keys = (_columns.model, _columns.adapter, _columns.priority_class, _columns.price_id, _columns.currency)
    statement = (
        select(day.label("day_ms"), *keys, *_SUMS)
        .where(_columns.tenant_id == tenant_id, _columns.period_ms == period_ms)
        .group_by(day, *keys)
    )
    merged: dict[tuple[Any, ...], Line] = {}
    for row in connection.execute(statement):
        line = Line(month_start_ms(row.day_ms), row.model, row.adapter, row.priority_class, row.price_id, _sums(row))
        key = (line.usage_month_ms, line.model, line.adapter, line.priority_class, line.price_id, line.sums.currency)
        known = merged.get(key)
        merged[key] = line if known is None else replace(line, sums=known.sums.plus(line.sums))
    return [merged[key] for key in sorted(merged) if not _is_empty(merged[key].sums)]


def _tenants(connection: Connection, period_ms: int) -> list[str]:
    connection.execute(lock_head)
    fold_all(connection)
    names = select(_columns.tenant_id).where(_columns.period_ms == period_ms).distinct().order_by(_columns.tenant_id)
    return list(connection.execute(names).scalars())


def _closed(connection: Connection) -> list[ClosedPeriod]:
    found = connection.execute(select(closed_periods).order_by(closed_periods.c.period_ms))
    return [_closed_period(row) for row in found]


def _closed_period(row: Row[Any]) -> ClosedPeriod:
    return ClosedPeriod(*(getattr(row, name) for name in ClosedPeriod.__dataclass_fields__))


def _sums(row: Row[Any]) -> Sums:
    counts = {name: int(getattr(row, name)) for name in HOUR_SUMS}
    return Sums(currency=row.currency, amount=row.amount, **counts)

"""The ledger's questions in SQL: groups, single rows and totals, over rows that nothing supersedes.

Each runs in one read transaction. Pages go by key, not by offset: a page costs the same wherever it begins, and rows
that arrive meanwhile shift nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, func, literal_column, select, tuple_

from services.metering.adapters.row_mapping import READ, ledger_row
from services.metering.adapters.schema import billing_outbox, exact_sum, ledger_head, quarantine, usage_rows
from services.metering.domain.periods import DAY_MS, HOUR_MS
from services.metering.domain.queries import (
    Dimension,
    GroupKey,
    GroupPage,
    Reconciliation,
    RowPage,
    Totals,
    UsageFilter,
    UsageGroup,
)

_columns = usage_rows.c


def _period_start(length_ms: int) -> ColumnElement[Any]:
    # A literal, not a parameter: PostgreSQL must see the same expression in SELECT and GROUP BY.
    return _columns.time_ms - _columns.time_ms % literal_column(str(length_ms))


_EXPRESSIONS: Final[Mapping[Dimension, ColumnElement[Any]]] = {
    Dimension.TENANT: _columns.tenant_id,
    Dimension.MODEL: _columns.model,
    Dimension.ADAPTER: _columns.adapter,
    Dimension.CLASS: _columns.priority_class,
    Dimension.KEY: _columns.key_id,
    Dimension.DAY: _period_start(DAY_MS),
    Dimension.HOUR: _period_start(HOUR_MS),
}
_TOTALS: Final[tuple[ColumnElement[Any], ...]] = (
    func.count().label("attempts"),
    func.count(_columns.request_id.distinct()).label("requests"),
    func.sum(_columns.input_tokens).label("input_tokens"),
    func.sum(_columns.cached_tokens).label("cached_tokens"),
    func.sum(_columns.output_tokens).label("output_tokens"),
    exact_sum(_columns.amount).label("amount"),
    _columns.currency.label("currency"),
)


def groups(
    connection: Connection, where: UsageFilter, by: Sequence[Dimension], after: GroupKey | None, limit: int
) -> GroupPage:
    """See `Ledger.groups`. O(rows that match)."""
    keys = [*(_EXPRESSIONS[dimension] for dimension in by), _columns.currency]
    labelled = [key.label(f"key_{place}") for place, key in enumerate(keys)]
    statement = _matching(select(*labelled, *_TOTALS), where).group_by(*keys).order_by(*keys).limit(limit + 1)
    if after is not None:
        statement = statement.where(tuple_(*keys) > tuple_(*after))
    found = [UsageGroup(tuple(row[: len(keys)]), _totals(row)) for row in connection.execute(statement)]
    page = tuple(found[:limit])
    return GroupPage(page, page[-1].key if len(found) > limit else None)


def rows(connection: Connection, where: UsageFilter, after: int | None, limit: int) -> RowPage:
    """See `Ledger.rows`."""
    statement = _matching(select(*READ), where).order_by(_columns.sequence).limit(limit + 1)
    if after is not None:
        statement = statement.where(_columns.sequence > after)
    found = [ledger_row(row) for row in connection.execute(statement)]
    page = tuple(found[:limit])
    return RowPage(page, page[-1].sequence if len(found) > limit else None)


def reconcile(connection: Connection, where: UsageFilter) -> Reconciliation:
    """See `Ledger.reconcile`. O(rows that match)."""
    totals = _matching(select(*_TOTALS), where).group_by(_columns.currency).order_by(_columns.currency)
    outcomes = _matching(select(_columns.outcome, func.count()), where).group_by(_columns.outcome)
    corrections = _matching(select(func.count()), where).where(_columns.corrects_sequence.is_not(None))
    waiting = select(func.count()).select_from(quarantine).where(quarantine.c.replayed_ms.is_(None))
    return Reconciliation(
        totals=tuple(_totals(row) for row in connection.execute(totals)),
        outcomes=tuple((row[0], row[1]) for row in connection.execute(outcomes.order_by(_columns.outcome))),
        corrections=connection.execute(corrections).scalar_one(),
        quarantined=connection.execute(waiting).scalar_one(),
        sequence=connection.execute(select(ledger_head.c.sequence)).scalar_one(),
        published_sequence=connection.execute(select(billing_outbox.c.published_sequence)).scalar_one(),
    )


def _matching(statement: Select[Any], where: UsageFilter) -> Select[Any]:
    conditions: list[ColumnElement[bool]] = [_columns.superseded_by.is_(None)]
    for column, wanted in (
        (_columns.tenant_id, where.tenant_id),
        (_columns.model, where.model),
        (_columns.key_id, where.key_id),
    ):
        if wanted is not None:
            conditions.append(column == wanted)
    if where.from_ms is not None:
        conditions.append(_columns.time_ms >= where.from_ms)
    if where.to_ms is not None:
        conditions.append(_columns.time_ms < where.to_ms)
    return statement.select_from(usage_rows).where(*conditions)


def _totals(row: Row[Any]) -> Totals:
    return Totals(
        attempts=row.attempts,
        requests=row.requests,
        input_tokens=int(row.input_tokens),  # PostgreSQL's sum of bigint is numeric
        cached_tokens=int(row.cached_tokens),
        output_tokens=int(row.output_tokens),
        amount=row.amount,
        currency=row.currency,
    )

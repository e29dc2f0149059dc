"""The ledger's questions in SQL: groups, single rows and totals, over rows that nothing supersedes.

Groups are added up from hourly sums where whole hours are asked for, and from single rows at the edges and for what is
not folded yet (`sql_rollup`); the answer is the same as over the rows alone, down to the last one committed. Each
question runs in one read transaction. Pages go by key, not by offset: a page costs the same wherever it begins, and
rows that arrive meanwhile shift nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    FromClause,
    Row,
    Select,
    and_,
    case,
    func,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
)

from services.metering.adapters.row_mapping import READ, ledger_row
from services.metering.adapters.schema import billing_outbox, exact_sum, ledger_head, quarantine, usage_rows
from services.metering.adapters.schema_accounts import HOUR_SUMS, usage_hours
from services.metering.adapters.sql_rollup import hour_of, summed
from services.metering.domain.periods import DAY_MS, HOUR_MS, hour_start_ms
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
from services.metering.domain.usage import TIME_MS_END

_columns = usage_rows.c
_NAMES: Final[Mapping[Dimension, str]] = {
    Dimension.TENANT: "tenant_id",
    Dimension.MODEL: "model",
    Dimension.ADAPTER: "adapter",
    Dimension.CLASS: "priority_class",
    Dimension.KEY: "key_id",
    Dimension.DAY: "day_ms",
    Dimension.HOUR: "hour_ms",
}
_SUMS: Final = ("attempts", "requests", "input_tokens", "cached_tokens", "output_tokens")
_TOTALS: Final[tuple[ColumnElement[Any], ...]] = (
    func.count().label("attempts"),
    func.sum(case((_columns.attempt <= 1, 1), else_=0)).label("requests"),
    func.sum(_columns.input_tokens).label("input_tokens"),
    func.sum(_columns.cached_tokens).label("cached_tokens"),
    func.sum(_columns.output_tokens).label("output_tokens"),
    exact_sum(_columns.amount).label("amount"),
    _columns.currency.label("currency"),
)


def groups(
    connection: Connection, where: UsageFilter, by: Sequence[Dimension], after: GroupKey | None, limit: int
) -> GroupPage:
    """See `Ledger.groups`. O(hourly sums that match + rows of the two hours at the edges + rows not folded yet)."""
    folded: int = connection.execute(select(ledger_head.c.folded_sequence)).scalar_one()
    counted = _counted(where, by, folded).subquery("counted")
    keys = [counted.c[_NAMES[dimension]] for dimension in by] + [counted.c.currency]
    sums = [func.sum(counted.c[name]).label(name) for name in _SUMS]
    statement = select(*keys, *sums, exact_sum(counted.c.amount).label("amount")).group_by(*keys).order_by(*keys)
    statement = statement.having(func.sum(counted.c.attempts) != 0).limit(limit + 1)
    if after is not None:
        statement = statement.where(tuple_(*keys) > tuple_(*after))
    found = [UsageGroup(tuple(row[: len(keys)]), _totals(row)) for row in connection.execute(statement)]
    page = tuple(found[:limit])
    return GroupPage(page, page[-1].key if len(found) > limit else None)


def _counted(where: UsageFilter, by: Sequence[Dimension], folded: int) -> CompoundSelect[Any]:
    """Everything that counts for the filter, once: sums of whole hours, rows since the fold, and the edges."""
    from_ms = where.from_ms or 0
    to_ms = TIME_MS_END if where.to_ms is None else where.to_ms
    whole_from, whole_to = hour_start_ms(from_ms + HOUR_MS - 1), hour_start_ms(to_ms)
    if whole_from >= whole_to:
        whole_from = whole_to = from_ms
    hours = _part(usage_hours, by, _hour_sums()).where(
        usage_hours.c.hour_ms >= whole_from, usage_hours.c.hour_ms < whole_to
    )
    time = _columns.time_ms
    # Not by an index on the time: what is not folded yet is few rows, found by their sequence.
    unindexed = time + literal_column("0")
    within = and_(unindexed >= whole_from, unindexed < whole_to)
    since = _part(usage_rows, by, summed(usage_rows, 1)).where(
        within, _columns.sequence > folded, _columns.superseded_by.is_(None)
    )
    taken_back = _part(usage_rows, by, summed(usage_rows, -1)).where(
        within, _columns.sequence + literal_column("0") <= folded, _columns.superseded_by > folded
    )
    parts = [hours, since, taken_back]
    if (from_ms, to_ms) != (whole_from, whole_to):
        edges = or_(and_(time >= from_ms, time < whole_from), and_(time >= whole_to, time < to_ms))
        parts.append(_part(usage_rows, by, summed(usage_rows, 1)).where(edges, _columns.superseded_by.is_(None)))
    # What was taken back is found by who took it back, not by its names: those have far more rows.
    unindexed_names = parts.index(taken_back)
    return union_all(
        *(part.where(*_names_match(part, where, plain=place != unindexed_names)) for place, part in enumerate(parts))
    )


def _hour_sums() -> list[ColumnElement[Any]]:
    return [*(usage_hours.c[name] for name in HOUR_SUMS), usage_hours.c.amount]


def _part(table: FromClause, by: Sequence[Dimension], sums: Sequence[ColumnElement[Any]]) -> Select[Any]:
    columns: Any = table.c
    hour = columns.hour_ms if table is usage_hours else hour_of(columns.time_ms)
    special = {"hour_ms": hour, "day_ms": hour - hour % literal_column(str(DAY_MS))}
    names = [_NAMES[dimension] for dimension in by]
    keys = [special.get(name, columns.get(name)).label(name) for name in names]
    return select(*keys, columns.currency, *sums).select_from(table)


def _names_match(part: Select[Any], where: UsageFilter, *, plain: bool) -> list[ColumnElement[bool]]:
    (table,) = part.get_final_froms()
    columns: Any = table.c
    return [
        (column if plain else column.concat(literal_column("''"))) == wanted
        for column, wanted in (
            (columns.tenant_id, where.tenant_id),
            (columns.model, where.model),
            (columns.key_id, where.key_id),
        )
        if wanted is not None
    ]


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
        attempts=int(row.attempts),
        requests=int(row.requests),
        input_tokens=int(row.input_tokens),  # PostgreSQL's sum of bigint is numeric
        cached_tokens=int(row.cached_tokens),
        output_tokens=int(row.output_tokens),
        amount=row.amount,
        currency=row.currency,
    )

"""Folds ledger rows into hourly sums, in ledger order, so that what a query costs grows with hours and not with rows.

A row adds to the hour of its own time in the month where it is booked; a correction also takes out what it corrects, in
the month where that is taken back. Each row is folded once: the cursor moves in the same transaction.
"""

from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, Select, case, func, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from services.metering.adapters.schema import (
    ONLY_ROW,
    exact_add,
    exact_negative,
    exact_sum,
    ledger_head,
    usage_rows,
)
from services.metering.adapters.schema_accounts import HOUR_KEY, HOUR_SUMS, usage_hours
from services.metering.domain.periods import HOUR_MS

FOLD_ROWS: Final = 8_192  # in one transaction: some tens of milliseconds in which nothing is appended

_replaced = usage_rows.alias("replaced")


def fold(connection: Connection, *, least: int, most: int = FOLD_ROWS) -> int:
    """Fold the next rows, at most `most`, none if fewer than `least` wait; how many. Call it with the head locked."""
    head = connection.execute(select(ledger_head).where(ledger_head.c.id == ONLY_ROW)).one()
    waiting = head.sequence - head.folded_sequence
    if waiting < max(least, 1):
        return 0
    upto = head.folded_sequence + min(waiting, most)
    fresh = usage_rows.c.sequence.between(head.folded_sequence + 1, upto)
    _add(connection, _sums(usage_rows, usage_rows.c.period_ms, sign=1).where(fresh))
    corrections = usage_rows.join(_replaced, _replaced.c.sequence == usage_rows.c.corrects_sequence)
    taken_back = _sums(_replaced, usage_rows.c.reversal_ms, sign=-1).select_from(corrections).where(fresh)
    _add(connection, taken_back)
    connection.execute(update(ledger_head).where(ledger_head.c.id == ONLY_ROW).values(folded_sequence=upto))
    return int(upto - head.folded_sequence)


def hour_of(time_ms: ColumnElement[int]) -> ColumnElement[int]:
    """Start of the hour that holds an instant. A literal, not a parameter: PostgreSQL must see one expression."""
    return time_ms - time_ms % literal_column(str(HOUR_MS))


def summed(rows: FromClause, sign: int) -> list[ColumnElement[Any]]:
    """What one row of `usage_rows` (or an alias) counts, each with the sign; the names are those of `HOUR_SUMS`."""
    columns: Any = rows.c
    ones = {
        "attempts": literal_column("1"),
        "requests": case((columns.attempt <= 1, literal_column("1")), else_=literal_column("0")),
    }
    counted = [ones.get(name, columns.get(name)) for name in HOUR_SUMS]
    amount = columns.amount if sign > 0 else exact_negative(columns.amount)
    signed = [value if sign > 0 else -value for value in counted]
    return [*(value.label(name) for value, name in zip(signed, HOUR_SUMS, strict=True)), amount.label("amount")]


def _sums(rows: FromClause, period: ColumnElement[Any], *, sign: int) -> Select[Any]:
    columns: Any = rows.c
    special = {"hour_ms": hour_of(columns.time_ms), "period_ms": period}
    keys = [special.get(name, columns.get(name)) for name in HOUR_KEY]
    *counts, amount = summed(rows, sign)
    sums = [func.sum(count.element).label(count.name) for count in counts]
    total = exact_sum(amount.element).label("amount")
    return select(*keys, *sums, total).group_by(*keys)


def _add(connection: Connection, found: Select[Any]) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    names = [*HOUR_KEY, *HOUR_SUMS, "amount"]
    statement: Any = dialect.insert(usage_hours).from_select(names, found)
    new = statement.excluded
    sums = {name: usage_hours.c[name] + new[name] for name in HOUR_SUMS}
    sums["amount"] = exact_add(usage_hours.c.amount, new.amount)
    connection.execute(statement.on_conflict_do_update(index_elements=list(HOUR_KEY), set_=sums))

"""Many new rows in few calls: a call costs more than a row.

SQLite gives up Python's lock once for every statement that it runs, and with a busy event loop gets it back late; so a
batch is a few statements of many rows, in sizes of powers of two so that the driver keeps them prepared. PostgreSQL
takes a batch as one COPY. Measured by `python -m benchmarks metering`.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

from sqlalchemy import Connection

from services.metering.adapters.row_mapping import STORED, column_values
from services.metering.adapters.schema import usage_rows
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.rating import money_text

ROWS_A_STATEMENT_MAX: Final = 512  # times 37 columns: below SQLite's 32,766 parameters, and a batch is two statements
_AMOUNT: Final = STORED.index("amount")
_COLUMNS: Final = ", ".join(STORED)
_COPY: Final = f"COPY {usage_rows.name} ({_COLUMNS}) FROM STDIN"


def insert_rows(connection: Connection, rows: Sequence[LedgerRow]) -> None:
    """Insert into `usage_rows`, in the transaction of `connection`. O(rows)."""
    if connection.dialect.name == "postgresql":
        _copy(connection, rows)
        return
    for part in _parts(rows):
        values = list(chain.from_iterable(map(column_values, part)))
        values[_AMOUNT :: len(STORED)] = [money_text(row.rating.amount) for row in part]
        connection.exec_driver_sql(_insert_statement(len(part)), tuple(values))


def _parts(rows: Sequence[LedgerRow]) -> Iterator[Sequence[LedgerRow]]:
    start, size = 0, ROWS_A_STATEMENT_MAX
    while start < len(rows):
        while size > len(rows) - start:
            size //= 2
        yield rows[start : start + size]
        start += size


@cache
def _insert_statement(rows: int) -> str:
    row = f"({', '.join('?' * len(STORED))})"
    return f"INSERT INTO {usage_rows.name} ({_COLUMNS}) VALUES {', '.join([row] * rows)}"  # noqa: S608 - own names


def _copy(connection: Connection, rows: Sequence[LedgerRow]) -> None:
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for row in rows:
            copy.write_row(column_values(row))

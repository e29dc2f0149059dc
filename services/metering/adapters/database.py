"""Connections to the ledger's database: SQLite in one file, or PostgreSQL.

A write transaction takes the write lock at its start, so what it reads first is still true when it commits. SQLite runs
in WAL mode with full synchronisation: an event is acknowledged only after it is on disk, and a commit that a power cut
could undo would be a lost bill. No query is here.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import psycopg
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError

from roundhouse.errors import InvalidInput, Unavailable
from services.metering.domain.rating import EXACT, money_text

BUSY_MS: Final = 5_000  # longer than any transaction of ours; another process may hold the file
CONNECT_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_MS: Final = 30_000  # a guess: a usage query that takes longer needs a narrower period
CHECKPOINT_PAGES: Final = 16_384  # 64 MiB of WAL: a full batch dirties about 1,000 pages, SQLite's default
CACHE_KIB: Final = 65_536  # the index of event ids is random: it must not fall out of the cache within a batch
READERS: Final = 4  # queries at once; a guess, each holds a thread


class DecimalSum:
    """SQLite aggregate that adds decimal texts exactly."""

    def __init__(self) -> None:
        self._sum = Decimal(0)

    def step(self, value: str | None) -> None:
        """One row."""
        if value is not None:
            self._sum = EXACT.add(self._sum, Decimal(value))

    def finalize(self) -> str:
        """The sum as text."""
        return money_text(self._sum)


def add_exactly(one: str, other: str) -> str:
    """Sum of two decimal texts, for SQLite."""
    return money_text(EXACT.add(Decimal(one), Decimal(other)))


def negate_exactly(text: str) -> str:
    """A decimal text with the other sign, for SQLite."""
    return money_text(Decimal(text).copy_negate())


def ledger_url(text: str) -> URL:
    """The URL with our driver. Raises Unavailable if it names no database that we can use."""
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise Unavailable("the ledger's URL cannot be read") from error
    backend = url.get_backend_name()
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and url.database:
        Path(url.database).absolute().parent.mkdir(parents=True, exist_ok=True)
        return url
    raise Unavailable("the ledger's URL must be sqlite:///FILE or postgresql://…")


def open_writer(url: URL) -> Engine:
    """One connection for writing."""
    return _open(url, connections=1, begin="BEGIN IMMEDIATE", isolation="READ COMMITTED")


def open_reader(url: URL) -> Engine:
    """A few connections for queries; each transaction sees one state of the ledger."""
    return _open(url, connections=READERS, begin="BEGIN", isolation="REPEATABLE READ")


def _open(url: URL, *, connections: int, begin: str, isolation: str) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, pool_size=connections, max_overflow=0)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        return engine
    options = f"-c statement_timeout={STATEMENT_TIMEOUT_MS}"
    return create_engine(
        url,
        isolation_level=isolation,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,  # finds that the server was restarted before a transaction needs it
        # Text is UTF-8 whatever the database was made with: one made in the C locale (SQL_ASCII) would give bytes.
        connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "options": options, "client_encoding": "utf8"},
    )


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we begin transactions ourselves; the driver would begin them too late
    for pragma in (
        *("synchronous=FULL", f"busy_timeout={BUSY_MS}"),
        *(f"wal_autocheckpoint={CHECKPOINT_PAGES}", f"cache_size=-{CACHE_KIB}"),
    ):
        connection.execute(f"PRAGMA {pragma}")
    connection.create_aggregate("exact_sum", 1, DecimalSum)
    connection.create_function("exact_add", 2, add_exactly, deterministic=True)
    connection.create_function("exact_negative", 1, negate_exactly, deterministic=True)
    _enter_wal(connection)


def _enter_wal(connection: Any) -> None:
    """Change a new file to WAL. SQLite does not apply the busy timeout to this one statement, so it is tried again."""
    deadline_s = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)  # we are on a thread of the ledger, never on the event loop
        else:
            return


@contextmanager
def translated_errors(doing: str) -> Iterator[None]:
    """Library errors as ours: InvalidInput if the database refuses a value, else Unavailable."""
    try:
        yield
    except (DataError, IntegrityError, psycopg.DataError, psycopg.IntegrityError) as error:
        raise InvalidInput(f"the ledger refuses a value: {doing}") from error
    except (DBAPIError, psycopg.Error) as error:  # the driver's own come from COPY
        raise Unavailable(f"the ledger does not answer: {doing}") from error
    except SQLAlchemyError as error:
        raise Unavailable(f"the ledger has no connection free: {doing}") from error

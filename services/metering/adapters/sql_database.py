"""The ledger's database as its stores use it: one thread that writes, a few that read, a transaction for each call.

Nothing of SQL runs on the event loop. Every store of metering (`sql_*`) is given the same one, so that whoever writes
two things in one transaction can.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection, Engine

from services.metering.adapters import schema_accounts, schema_nodes, schema_webhooks
from services.metering.adapters.database import READERS, ledger_url, open_reader, open_writer, translated_errors
from services.metering.adapters.migrating import migrate

Answer = TypeVar("Answer")

TABLES = (schema_accounts, schema_nodes, schema_webhooks)
"""Whoever uses a database knows its whole schema, and not only what its own store needs."""


class SqlDatabase:
    """Threads and connections of one database. Make it with `SqlDatabase.open`."""

    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._writer = writer
        self._reader = reader
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="ledger-write")
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="ledger-read")

    @classmethod
    async def open(cls, url: str) -> "SqlDatabase":
        """Connect and migrate. Raises Unavailable."""
        resolved = ledger_url(url)
        database = cls(open_writer(resolved), open_reader(resolved))
        try:
            await asyncio.get_running_loop().run_in_executor(database._write_thread, migrate, database._writer)
        except BaseException:
            await database.close()
            raise
        return database

    async def close(self) -> None:
        """Let running transactions end, then disconnect. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._write_thread.shutdown()
        self._read_threads.shutdown()
        self._writer.dispose()
        self._reader.dispose()

    async def write(self, doing: str, work: Callable[[Connection], Answer]) -> Answer:
        """Run `work` in one transaction that holds the write lock (SQLite) from its start. Raises Unavailable,
        InvalidInput. Cancelled: it may or may not have happened."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._write_thread, _in_transaction, self._writer, doing, work)

    async def read(self, doing: str, work: Callable[[Connection], Answer]) -> Answer:
        """Run `work` in one transaction that sees one state. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._read_threads, _in_transaction, self._reader, doing, work)


def _in_transaction(engine: Engine, doing: str, work: Callable[[Connection], Answer]) -> Answer:
    with translated_errors(doing), engine.begin() as connection:
        return work(connection)

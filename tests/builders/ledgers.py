"""Empty ledgers in real databases for tests: made once, then copied or emptied, so that an example costs little."""

import shutil
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import text, update

from services.metering.adapters.database import ledger_url, open_reader
from services.metering.adapters.schema import billing_outbox, ledger_head, metadata
from services.metering.adapters.sql_ledger import SqlLedger


def drop_all(url: str) -> None:
    """Drop what an earlier test left in a PostgreSQL database."""
    engine = open_reader(ledger_url(url))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()


def database_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """An empty database of a kind, `sqlite` or `postgresql`."""
    if kind == "sqlite":
        return f"sqlite:///{folder}/ledger.sqlite3"
    url = cast("str", request.getfixturevalue("postgres_url"))
    drop_all(url)
    return url


class EmptyLedgers:
    """Gives migrated, empty databases of one kind, one after the other; only the newest may be used."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._given = 0

    async def migrate(self) -> None:
        """Make the first one; call it once."""
        await (await SqlLedger.open(self._url)).close()

    def fresh(self) -> str:
        """The URL of an empty ledger."""
        if self._url.startswith("sqlite"):
            self._given += 1
            path = self._folder / f"example-{self._given}.sqlite3"
            shutil.copy(self._folder / "ledger.sqlite3", path)
            return f"sqlite:///{path}"
        engine = open_reader(ledger_url(self._url))
        with engine.begin() as connection:
            for table in metadata.sorted_tables:
                if table not in (ledger_head, billing_outbox):
                    connection.execute(table.delete())
            connection.execute(update(ledger_head).values(sequence=0, open_from_ms=0, changes=0, folded_sequence=0))
            connection.execute(update(billing_outbox).values(published_sequence=0, holder="", lease_until_ms=0, turn=0))
        engine.dispose()
        return self._url

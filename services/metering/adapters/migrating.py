"""Brings the ledger's schema to what this version needs, when a process starts.

Idempotent and safe for several processes at once: SQLite's write lock or a PostgreSQL advisory lock lets one at a time
in, and a migration and its version number commit together. Backwards it never goes.
"""

from importlib import resources
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Engine, text

from roundhouse.errors import Unavailable
from services.metering.adapters.database import translated_errors

_LOCK_NUMBER: Final = 0x524F_554E_4448  # "ROUNDH": any number that nobody else locks in this database


def migrate(writer: Engine) -> None:
    """Run what is missing. Raises Unavailable: the database is away, or its schema is newer than this program."""
    config = Config()
    folder = resources.files("services.metering.adapters") / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    try:
        with translated_errors("migrate"), writer.begin() as connection:
            if connection.dialect.name == "postgresql":
                # An index over a large ledger, or the wait for who makes it, takes longer than any query may.
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        raise Unavailable("the ledger's schema is of another version than this program") from error

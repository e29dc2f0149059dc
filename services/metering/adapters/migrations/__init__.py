"""Alembic migrations of the ledger, run by `adapters.migrating`. A released one is never edited."""

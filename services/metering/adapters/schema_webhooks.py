"""Tables of the webhook sender."""

from sqlalchemy import BigInteger, Boolean, Column, Table

from services.metering.adapters.schema import TEXT, metadata

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    Column("endpoint_id", TEXT, primary_key=True),
    Column("url", TEXT, nullable=False),
    Column("secret", TEXT, nullable=False),
    Column("tenant_id", TEXT, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("next_ms", BigInteger, nullable=False),
    Column("active", Boolean, nullable=False),
    Column("last_error", TEXT, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("holder", TEXT, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
)

webhook_dead = Table(
    "webhook_dead",
    metadata,
    Column("endpoint_id", TEXT, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("reason", TEXT, nullable=False),
    Column("failed_ms", BigInteger, nullable=False),
)
"""Records that an endpoint did not take."""

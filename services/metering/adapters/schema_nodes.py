"""Where nodes were seen. Bits as hexadecimal text: an hour has 360 of them."""

from sqlalchemy import BigInteger, Column, Table

from services.metering.adapters.schema import TEXT, metadata

node_hours = Table(
    "node_hours",
    metadata,
    Column("hour_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("node_id", TEXT, primary_key=True),
    Column("pool", TEXT, primary_key=True),
    Column("present", TEXT, nullable=False),
    Column("loading", TEXT, nullable=False),
    Column("devices", BigInteger, nullable=False),
)

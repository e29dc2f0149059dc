"""Tables around the ledger's rows: hourly sums, prices, closed periods, and what is known of erased tenants.

Hourly sums are folded from the rows, in ledger order, by `sql_rollup`; they stay when single rows are removed.
"""

from sqlalchemy import BigInteger, Column, Index, Integer, String, Table, UniqueConstraint

from services.metering.adapters.schema import TEXT, ExactDecimal, metadata

HOUR_KEY = (
    *("tenant_id", "hour_ms", "model", "adapter", "priority_class", "key_id", "node_id"),
    *("currency", "price_id", "period_ms"),
)
HOUR_SUMS = ("attempts", "requests", "input_tokens", "cached_tokens", "output_tokens", "run_ms")
_NUMBERS = ("hour_ms", "period_ms")

usage_hours = Table(
    "usage_hours",
    metadata,
    *(
        Column(name, BigInteger if name in _NUMBERS else TEXT, primary_key=True, autoincrement=False)
        for name in HOUR_KEY
    ),
    *(Column(name, BigInteger, nullable=False) for name in HOUR_SUMS),
    Column("amount", ExactDecimal, nullable=False),
    Index("usage_hours_time", "hour_ms"),
    Index("usage_hours_period", "period_ms", "tenant_id"),
    sqlite_with_rowid=False,
)
"""Net sums of the rows up to `ledger_head.folded_sequence`: what is corrected is taken out again."""

prices = Table(
    "prices",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("model", TEXT, nullable=False),
    Column("adapter", TEXT, nullable=False),
    Column("priority_class", TEXT, nullable=False),
    Column("price_id", TEXT, nullable=False),
    Column("currency", TEXT, nullable=False),
    Column("input", TEXT, nullable=False),
    Column("cached_input", TEXT, nullable=False),
    Column("output", TEXT, nullable=False),
    Column("from_ms", BigInteger, nullable=False),
    Column("to_ms", BigInteger),
    Column("declared_from_ms", BigInteger),
    Column("origin", TEXT, nullable=False),
    Column("recorded_ms", BigInteger, nullable=False),
    UniqueConstraint("model", "adapter", "priority_class", "from_ms", name="prices_once"),
)

closed_periods = Table(
    "closed_periods",
    metadata,
    Column("period_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("sequence", BigInteger, nullable=False),
    Column("closed_ms", BigInteger, nullable=False),
    Column("document", TEXT, nullable=False),
    Column("signature", TEXT, nullable=False),
    Column("public_key", TEXT, nullable=False),
)
"""What was signed, byte for byte. It names tenants by pseudonym, so that an erasure need not touch it."""

tenant_pseudonyms = Table(
    "tenant_pseudonyms",
    metadata,
    Column("tenant_id", TEXT, primary_key=True),
    Column("pseudonym", TEXT, nullable=False, unique=True),
)

erased_tenants = Table(
    "erased_tenants",
    metadata,
    Column("tenant_hash", String(64), primary_key=True),
    Column("pseudonym", TEXT, nullable=False),
    Column("erased_ms", BigInteger, nullable=False),
)
"""Whose events are recorded under a pseudonym from now on; the name itself is not kept."""

tenant_retention = Table(
    "tenant_retention",
    metadata,
    Column("tenant_id", TEXT, primary_key=True),
    Column("removed_before_ms", BigInteger, nullable=False),
)

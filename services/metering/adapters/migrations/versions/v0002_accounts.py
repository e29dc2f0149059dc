"""Accounting periods and corrections of every kind, hourly sums, prices, closed periods, erasure and retention."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_AMOUNT = sa.Text().with_variant(sa.Numeric(), "postgresql")
_MONTH_START = {
    "sqlite": "CAST(strftime('%s', time_ms / 1000, 'unixepoch', 'start of month') AS INTEGER) * 1000",
    "postgresql": "CAST(extract(epoch FROM date_trunc('month', to_timestamp(time_ms / 1000) AT TIME ZONE 'UTC')) "
    "AS bigint) * 1000",
}


def upgrade() -> None:
    """Add columns, book what is recorded in the month of its own time, make the new tables."""
    _extend_rows()
    for name in ("open_from_ms", "changes", "folded_sequence"):
        op.add_column("ledger_head", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    _hours()
    _prices()
    op.create_table(
        "closed_periods",
        sa.Column("period_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("closed_ms", sa.BigInteger(), nullable=False),
        *(sa.Column(name, _TEXT, nullable=False) for name in ("document", "signature", "public_key")),
    )
    op.create_table(
        "tenant_pseudonyms",
        sa.Column("tenant_id", _TEXT, primary_key=True),
        sa.Column("pseudonym", _TEXT, nullable=False, unique=True),
    )
    op.create_table(
        "erased_tenants",
        sa.Column("tenant_hash", sa.String(64), primary_key=True),
        sa.Column("pseudonym", _TEXT, nullable=False),
        sa.Column("erased_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "tenant_retention",
        sa.Column("tenant_id", _TEXT, primary_key=True),
        sa.Column("removed_before_ms", sa.BigInteger(), nullable=False),
    )


def _extend_rows() -> None:
    op.add_column("usage_rows", sa.Column("period_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("usage_rows", sa.Column("kind", _TEXT, nullable=False, server_default="usage"))
    op.add_column("usage_rows", sa.Column("reversal_ms", sa.BigInteger()))
    month = _MONTH_START[op.get_bind().dialect.name]
    op.execute(f"UPDATE usage_rows SET period_ms = {month}")  # noqa: S608 - own text
    op.execute(
        "UPDATE usage_rows SET kind = 'supersedes', reversal_ms = "
        "(SELECT c.period_ms FROM usage_rows AS c WHERE c.sequence = usage_rows.corrects_sequence) "
        "WHERE corrects_sequence IS NOT NULL"
    )
    op.create_index("usage_rows_time", "usage_rows", ["time_ms"])
    replaced = sa.text("superseded_by IS NOT NULL")
    op.create_index(
        "usage_rows_superseded", "usage_rows", ["superseded_by"], sqlite_where=replaced, postgresql_where=replaced
    )


def _hours() -> None:
    texts = ("model", "adapter", "priority_class", "key_id", "node_id", "currency", "price_id")
    op.create_table(
        "usage_hours",
        sa.Column("tenant_id", _TEXT, primary_key=True),
        sa.Column("hour_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        *(sa.Column(name, _TEXT, primary_key=True) for name in texts),
        sa.Column("period_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("attempts", "requests", "input_tokens", "cached_tokens", "output_tokens", "run_ms")
        ),
        sa.Column("amount", _AMOUNT, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("usage_hours_time", "usage_hours", ["hour_ms"])
    op.create_index("usage_hours_period", "usage_hours", ["period_ms", "tenant_id"])


def _prices() -> None:
    selector = ("model", "adapter", "priority_class")
    content = ("price_id", "currency", "input", "cached_input", "output")
    op.create_table(
        "prices",
        sa.Column("number", sa.Integer(), primary_key=True),
        *(sa.Column(name, _TEXT, nullable=False) for name in (*selector, *content)),
        sa.Column("from_ms", sa.BigInteger(), nullable=False),
        sa.Column("to_ms", sa.BigInteger()),
        sa.Column("declared_from_ms", sa.BigInteger()),
        sa.Column("origin", _TEXT, nullable=False),
        sa.Column("recorded_ms", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint(*selector, "from_ms", name="prices_once"),
    )

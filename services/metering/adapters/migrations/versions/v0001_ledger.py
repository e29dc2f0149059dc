"""The ledger: rows of usage, its head, the billing outbox and the quarantine."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_AMOUNT = sa.Text().with_variant(sa.Numeric(), "postgresql")
_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXTS = (
    *("event_id", "tenant_id", "source", "request_id", "key_id", "model", "model_digest", "adapter", "adapter_digest"),
    *("priority_class", "outcome", "finish_reason", "counted_by", "node_id", "operation", "emitter"),
    *("price_id", "currency"),
)
_NUMBERS = (
    *("time_ms", "attempt", "status", "input_tokens", "cached_tokens", "output_tokens"),
    *("queue_ms", "stage_ms", "load_ms", "first_token_ms", "total_ms", "run_ms", "recorded_ms"),
)


def upgrade() -> None:
    """Make the tables and the two rows that always exist."""
    op.create_table(
        "usage_rows",
        sa.Column("sequence", _SEQUENCE, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.SmallInteger(), nullable=False),
        *(sa.Column(name, _TEXT, nullable=False) for name in _TEXTS),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _NUMBERS),
        sa.Column("amount", _AMOUNT, nullable=False),
        sa.Column("corrects_sequence", sa.BigInteger()),
        sa.Column("superseded_by", sa.BigInteger()),
        sa.UniqueConstraint("event_id", "tenant_id", "source", "revision", name="usage_rows_once"),
    )
    op.create_index("usage_rows_period", "usage_rows", ["tenant_id", "time_ms"])
    head = op.create_table(
        "ledger_head",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
    )
    outbox = op.create_table(
        "billing_outbox",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("published_sequence", sa.BigInteger(), nullable=False),
        sa.Column("holder", _TEXT, nullable=False),
        sa.Column("lease_until_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "quarantine",
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("subject", _TEXT, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("reason", _TEXT, nullable=False),
        sa.Column("first_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("replayed_ms", sa.BigInteger()),
    )
    op.bulk_insert(head, [{"id": 1, "sequence": 0}])
    op.bulk_insert(outbox, [{"id": 1, "published_sequence": 0, "holder": "", "lease_until_ms": 0}])

"""Webhook endpoints and the records that they did not take."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "webhook_endpoints",
        sa.Column("endpoint_id", _TEXT, primary_key=True),
        *(sa.Column(name, _TEXT, nullable=False) for name in ("url", "secret", "tenant_id", "last_error", "holder")),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("sequence", "attempts", "next_ms", "created_ms", "lease_until_ms")
        ),
        sa.Column("active", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "webhook_dead",
        sa.Column("endpoint_id", _TEXT, primary_key=True),
        sa.Column("sequence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("reason", _TEXT, nullable=False),
        sa.Column("failed_ms", sa.BigInteger(), nullable=False),
    )

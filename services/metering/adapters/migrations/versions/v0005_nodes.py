"""Where nodes were seen, for the allocation of their cost."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "node_hours",
        sa.Column("hour_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("node_id", _TEXT, primary_key=True),
        sa.Column("pool", _TEXT, primary_key=True),
        sa.Column("present", _TEXT, nullable=False),
        sa.Column("loading", _TEXT, nullable=False),
        sa.Column("devices", sa.BigInteger(), nullable=False),
    )

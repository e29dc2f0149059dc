"""How often the publication of the billing stream was begun again."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the count."""
    op.add_column("billing_outbox", sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))

"""Reads what the ledger must not know again."""

from sqlalchemy import Connection, select

from services.metering.adapters.schema_accounts import erased_tenants, tenant_retention
from services.metering.domain.forgetting import Forgotten


def read_forgotten(connection: Connection, changes: int) -> Forgotten:
    """Erased tenants and removals, as of `changes`; call it with the head locked."""
    erased = select(erased_tenants.c.tenant_hash, erased_tenants.c.pseudonym)
    removed = select(tenant_retention.c.tenant_id, tenant_retention.c.removed_before_ms)
    return Forgotten(
        changes,
        {row.tenant_hash: row.pseudonym for row in connection.execute(erased)},
        {row.tenant_id: row.removed_before_ms for row in connection.execute(removed)},
    )

"""Erasure and retention in SQL. See `money_ports.Forgetting`.

Both keep every sum: an erasure moves them to the tenant's pseudonym, a removal leaves the hourly sums where they are.
Each is one transaction (a removal: one a thousand rows) that holds the head, so that no event slips in between.
"""

from typing import Any, Final

from sqlalchemy import Connection, case, delete, func, insert, literal_column, select, update

from roundhouse import subjects
from services.metering.adapters.schema import (
    ONLY_ROW,
    billing_outbox,
    exact_sum,
    ledger_head,
    quarantine,
    usage_rows,
)
from services.metering.adapters.schema_accounts import (
    HOUR_KEY,
    HOUR_SUMS,
    erased_tenants,
    tenant_pseudonyms,
    tenant_retention,
    usage_hours,
)
from services.metering.adapters.schema_webhooks import webhook_dead, webhook_endpoints
from services.metering.adapters.sql_accounts import fold_all, pseudonym_of
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_ledger import lock_head
from services.metering.domain.forgetting import ERASED_ADAPTER, tenant_hash
from services.metering.money_ports import Erased

REMOVE_ROWS: Final = 1_000  # in one transaction: some milliseconds in which nothing is appended
_rows = usage_rows.c
_hours = usage_hours.c


class SqlForgetting:
    """See `money_ports.Forgetting`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def erase(self, tenant_id: str, *, now_ms: int) -> Erased:
        """See `Forgetting.erase`."""
        return await self._database.write("erase", lambda connection: _erase(connection, tenant_id, now_ms))

    async def remove(self, tenant_id: str, *, before_ms: int) -> int:
        """See `Forgetting.remove`."""
        removed = 0
        while True:
            part = await self._database.write("remove", lambda connection: _remove(connection, tenant_id, before_ms))
            removed += part
            if part < REMOVE_ROWS:
                return removed


def _erase(connection: Connection, tenant_id: str, now_ms: int) -> Erased:
    connection.execute(lock_head)
    fold_all(connection)
    named = tenant_hash(tenant_id)
    known = select(erased_tenants.c.pseudonym).where(erased_tenants.c.tenant_hash == named)
    pseudonym: str | None = connection.execute(known).scalar_one_or_none()
    if pseudonym is None:
        pseudonym = pseudonym_of(connection, tenant_id)
        values = {"tenant_hash": named, "pseudonym": pseudonym, "erased_ms": now_ms}
        connection.execute(insert(erased_tenants).values(values))
    rows = _rename_rows(connection, tenant_id, pseudonym)
    _rename_hours(connection, tenant_id, pseudonym)
    _drop_names(connection, tenant_id, pseudonym)
    _count_change(connection)
    return Erased(pseudonym, rows)


def _without_name(column: Any) -> Any:
    # Literals, not parameters: PostgreSQL must see one expression in SELECT and GROUP BY.
    return case((column == literal_column("''"), literal_column("''")), else_=literal_column(f"'{ERASED_ADAPTER}'"))


def _rename_rows(connection: Connection, tenant_id: str, pseudonym: str) -> int:
    values: dict[Any, Any] = {
        _rows.tenant_id: pseudonym,
        _rows.key_id: "",
        _rows.adapter: _without_name(_rows.adapter),
        _rows.adapter_digest: "",
    }
    return connection.execute(update(usage_rows).where(_rows.tenant_id == tenant_id).values(values)).rowcount


def _rename_hours(connection: Connection, tenant_id: str, pseudonym: str) -> None:
    """Sums of one hour meet where only key or adapter told them apart."""
    adapter = _without_name(_hours.adapter)
    kept = [_hours[name] for name in HOUR_KEY if name not in ("tenant_id", "key_id", "adapter")]
    sums = [func.sum(_hours[name]).label(name) for name in HOUR_SUMS]
    amount = exact_sum(_hours.amount).label("amount")
    mine = _hours.tenant_id == tenant_id
    found = connection.execute(
        select(adapter.label("adapter"), *kept, *sums, amount).where(mine).group_by(adapter, *kept)
    ).all()
    connection.execute(delete(usage_hours).where(mine))
    renamed = [{**row._mapping, "tenant_id": pseudonym, "key_id": ""} for row in found]
    if renamed:
        connection.execute(insert(usage_hours), renamed)


def _drop_names(connection: Connection, tenant_id: str, pseudonym: str) -> None:
    connection.execute(delete(tenant_pseudonyms).where(tenant_pseudonyms.c.tenant_id == tenant_id))
    connection.execute(delete(quarantine).where(quarantine.c.subject == subjects.usage(tenant_id)))
    endpoints = select(webhook_endpoints.c.endpoint_id).where(webhook_endpoints.c.tenant_id == tenant_id)
    connection.execute(delete(webhook_dead).where(webhook_dead.c.endpoint_id.in_(endpoints)))
    connection.execute(delete(webhook_endpoints).where(webhook_endpoints.c.tenant_id == tenant_id))
    renamed = update(tenant_retention).where(tenant_retention.c.tenant_id == tenant_id)
    connection.execute(renamed.values(tenant_id=pseudonym))


def _remove(connection: Connection, tenant_id: str, before_ms: int) -> int:
    head = connection.execute(lock_head).one()
    fold_all(connection)
    published = select(billing_outbox.c.published_sequence).where(billing_outbox.c.id == ONLY_ROW)
    chosen = (
        select(_rows.sequence)
        .where(_rows.tenant_id == tenant_id, _rows.time_ms < before_ms, _rows.period_ms < head.open_from_ms)
        .where(_rows.sequence <= published.scalar_subquery())
        .limit(REMOVE_ROWS)
    )
    removed = connection.execute(delete(usage_rows).where(_rows.sequence.in_(chosen))).rowcount
    # Only what went cannot be told from a repeat: of a month that is open every row is still there (0078).
    if removed and _move_limit(connection, tenant_id, min(before_ms, head.open_from_ms)):
        _count_change(connection)
    return removed


def _move_limit(connection: Connection, tenant_id: str, before_ms: int) -> bool:
    limit = tenant_retention.c
    statement = select(limit.removed_before_ms).where(limit.tenant_id == tenant_id)
    known: int | None = connection.execute(statement).scalar_one_or_none()
    if known is None:
        connection.execute(insert(tenant_retention).values(tenant_id=tenant_id, removed_before_ms=before_ms))
        return True
    if known >= before_ms:
        return False
    connection.execute(update(tenant_retention).where(limit.tenant_id == tenant_id).values(removed_before_ms=before_ms))
    return True


def _count_change(connection: Connection) -> None:
    changed = update(ledger_head).where(ledger_head.c.id == ONLY_ROW)
    connection.execute(changed.values(changes=ledger_head.c.changes + 1))

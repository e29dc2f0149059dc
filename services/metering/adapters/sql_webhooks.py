"""`WebhookStore` in SQL: endpoints, how far each is, and what each did not take."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from services.metering.adapters.row_mapping import READ, ledger_row
from services.metering.adapters.schema import ledger_head, usage_rows
from services.metering.adapters.schema_webhooks import webhook_dead, webhook_endpoints
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_ledger import with_credits
from services.metering.domain.webhooks import Endpoint
from services.metering.money_ports import DeadRecord, WebhookRows

_columns = webhook_endpoints.c
_FIELDS = tuple(Endpoint.__dataclass_fields__)


class SqlWebhooks:
    """See `ports.WebhookStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def add(self, endpoint: Endpoint) -> None:
        """See `WebhookStore.add`."""
        values = {name: getattr(endpoint, name) for name in _FIELDS} | {"holder": "", "lease_until_ms": 0}
        await self._database.write("add a webhook", lambda c: c.execute(insert(webhook_endpoints).values(values)))

    async def remove(self, endpoint_id: str) -> bool:
        """See `WebhookStore.remove`."""
        return await self._database.write("remove a webhook", lambda connection: _remove(connection, endpoint_id))

    async def endpoints(self) -> Sequence[Endpoint]:
        """See `WebhookStore.endpoints`."""
        return await self._database.read("webhooks", _endpoints)

    async def head(self) -> int:
        """See `WebhookStore.head`."""
        return await self._database.read("head", lambda c: int(c.execute(select(ledger_head.c.sequence)).scalar_one()))

    async def claim(self, holder: str, *, now_ms: int, lease_ms: int) -> Sequence[Endpoint]:
        """See `WebhookStore.claim`."""
        if not await self._database.read("webhooks due", lambda connection: _due(connection, holder, now_ms)):
            return ()  # a ledger without work is not written to
        return await self._database.write("claim", lambda connection: _claim(connection, holder, now_ms, lease_ms))

    async def rows_after(self, endpoint: Endpoint, *, limit: int) -> WebhookRows:
        """See `WebhookStore.rows_after`."""
        return await self._database.read("webhook rows", lambda connection: _rows(connection, endpoint, limit))

    async def note(self, endpoint: Endpoint, holder: str) -> None:
        """See `WebhookStore.note`."""
        await self._database.write("note a webhook", lambda connection: _note(connection, endpoint, holder))

    async def bury(self, endpoint: Endpoint, sequence: int, reason: str, *, now_ms: int) -> None:
        """See `WebhookStore.bury`."""
        await self._database.write("bury", lambda c: _bury(c, endpoint.endpoint_id, sequence, reason, now_ms))

    async def dead(self, endpoint_id: str) -> Sequence[DeadRecord]:
        """See `WebhookStore.dead`."""
        return await self._database.read("dead records", lambda connection: _dead(connection, endpoint_id))

    async def send_again(self, endpoint_id: str, sequence: int) -> bool:
        """See `WebhookStore.send_again`."""
        return await self._database.write("send again", lambda c: _send_again(c, endpoint_id, sequence))


def _endpoint(row: Row[Any]) -> Endpoint:
    return Endpoint(**{name: getattr(row, name) for name in _FIELDS})


def _endpoints(connection: Connection) -> list[Endpoint]:
    return [_endpoint(row) for row in connection.execute(select(webhook_endpoints).order_by(_columns.created_ms))]


def _remove(connection: Connection, endpoint_id: str) -> bool:
    connection.execute(delete(webhook_dead).where(webhook_dead.c.endpoint_id == endpoint_id))
    gone = connection.execute(delete(webhook_endpoints).where(_columns.endpoint_id == endpoint_id))
    return bool(gone.rowcount)


def _is_due(holder: str, now_ms: int, head: int) -> Any:
    free = (_columns.holder == holder) | (_columns.lease_until_ms <= now_ms)
    return _columns.active & (_columns.next_ms <= now_ms) & (_columns.sequence < head) & free


def _due(connection: Connection, holder: str, now_ms: int) -> bool:
    head: int = connection.execute(select(ledger_head.c.sequence)).scalar_one()
    return (
        connection.execute(select(_columns.endpoint_id).where(_is_due(holder, now_ms, head)).limit(1)).first()
        is not None
    )


def _claim(connection: Connection, holder: str, now_ms: int, lease_ms: int) -> list[Endpoint]:
    head: int = connection.execute(select(ledger_head.c.sequence)).scalar_one()
    taken = update(webhook_endpoints).where(_is_due(holder, now_ms, head))
    taken = taken.values(holder=holder, lease_until_ms=now_ms + lease_ms)
    return [_endpoint(row) for row in connection.execute(taken.returning(webhook_endpoints))]


def _rows(connection: Connection, endpoint: Endpoint, limit: int) -> WebhookRows:
    head: int = connection.execute(select(ledger_head.c.sequence)).scalar_one()
    statement = select(*READ).where(usage_rows.c.sequence > endpoint.sequence).order_by(usage_rows.c.sequence)
    if endpoint.tenant_id:
        statement = statement.where(usage_rows.c.tenant_id == endpoint.tenant_id)
    rows = with_credits(connection, [ledger_row(row) for row in connection.execute(statement.limit(limit))])
    return WebhookRows(tuple(rows), rows[-1].sequence if len(rows) == limit else head)


def _note(connection: Connection, endpoint: Endpoint, holder: str) -> None:
    changed = ("sequence", "attempts", "next_ms", "active", "last_error")
    values = {name: getattr(endpoint, name) for name in changed}
    mine = (_columns.endpoint_id == endpoint.endpoint_id) & (_columns.holder == holder)
    connection.execute(update(webhook_endpoints).where(mine).values(values))


def _bury(connection: Connection, endpoint_id: str, sequence: int, reason: str, now_ms: int) -> None:
    connection.execute(_is_dead(endpoint_id, sequence, delete(webhook_dead)))
    values = {"endpoint_id": endpoint_id, "sequence": sequence, "reason": reason, "failed_ms": now_ms}
    connection.execute(insert(webhook_dead).values(values))


def _is_dead(endpoint_id: str, sequence: int, statement: Any) -> Any:
    return statement.where(webhook_dead.c.endpoint_id == endpoint_id, webhook_dead.c.sequence == sequence)


def _dead(connection: Connection, endpoint_id: str) -> list[DeadRecord]:
    found = select(webhook_dead).where(webhook_dead.c.endpoint_id == endpoint_id).order_by(webhook_dead.c.sequence)
    return [DeadRecord(row.sequence, row.reason, row.failed_ms) for row in connection.execute(found)]


def _send_again(connection: Connection, endpoint_id: str, sequence: int) -> bool:
    again = {"sequence": sequence - 1, "attempts": 0, "next_ms": 0, "active": True, "holder": "", "lease_until_ms": 0}
    changed = connection.execute(update(webhook_endpoints).where(_columns.endpoint_id == endpoint_id).values(again))
    after = webhook_dead.c.sequence >= sequence
    connection.execute(delete(webhook_dead).where(webhook_dead.c.endpoint_id == endpoint_id, after))
    return bool(changed.rowcount)

"""`NodeHours` in SQL: sightings of nodes, merged, and what ran on them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from services.metering.adapters.schema_accounts import usage_hours
from services.metering.adapters.schema_nodes import node_hours
from services.metering.adapters.sql_accounts import fold_all
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_ledger import lock_head
from services.metering.domain.costs import NodeHour, NodeUse

_columns = node_hours.c
_USE_SUMS = ("input_tokens", "cached_tokens", "output_tokens", "run_ms")


class SqlNodeHours:
    """See `money_ports.NodeHours`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def merge(self, hours: Sequence[NodeHour]) -> None:
        """See `NodeHours.merge`."""
        await self._database.write("merge node hours", lambda connection: _merge(connection, hours))

    async def between(self, from_ms: int, to_ms: int) -> tuple[Sequence[NodeHour], Sequence[NodeUse]]:
        """See `NodeHours.between`."""
        return await self._database.write("read node hours", lambda connection: _between(connection, from_ms, to_ms))


def _merge(connection: Connection, hours: Sequence[NodeHour]) -> None:
    connection.execute(lock_head)  # one process at a time: what is read here is still true when it is written
    for hour in hours:
        same = (_columns.hour_ms == hour.hour_ms) & (_columns.node_id == hour.node_id) & (_columns.pool == hour.pool)
        known = connection.execute(select(node_hours).where(same)).first()
        if known is None:
            connection.execute(insert(node_hours).values(_values(hour)))
        else:
            connection.execute(update(node_hours).where(same).values(_values(_node_hour(known).merged(hour))))


def _values(hour: NodeHour) -> dict[str, Any]:
    return {
        "hour_ms": hour.hour_ms,
        "node_id": hour.node_id,
        "pool": hour.pool,
        "present": f"{hour.present:x}",
        "loading": f"{hour.loading:x}",
        "devices": hour.devices,
    }


def _node_hour(row: Row[Any]) -> NodeHour:
    return NodeHour(row.hour_ms, row.node_id, row.pool, int(row.present, 16), int(row.loading, 16), row.devices)


def _between(connection: Connection, from_ms: int, to_ms: int) -> tuple[list[NodeHour], list[NodeUse]]:
    connection.execute(lock_head)
    fold_all(connection)
    hours = select(node_hours).where(_columns.hour_ms >= from_ms, _columns.hour_ms < to_ms)
    used = usage_hours.c
    keys = (used.hour_ms, used.node_id, used.model)
    uses = (
        select(*keys, *(func.sum(used[name]).label(name) for name in _USE_SUMS))
        .where(used.hour_ms >= from_ms, used.hour_ms < to_ms)
        .group_by(*keys)
    )
    return (
        [_node_hour(row) for row in connection.execute(hours.order_by(_columns.hour_ms, _columns.node_id))],
        [NodeUse(row.hour_ms, row.node_id, row.model, *map(int, row[3:])) for row in connection.execute(uses)],
    )

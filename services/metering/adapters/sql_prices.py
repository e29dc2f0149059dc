"""`PriceStore` in SQL. Rows are only added: a price that was ever used can be looked up for ever."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select
from sqlalchemy.dialects import postgresql, sqlite

from roundhouse.catalogue.records import Price
from services.metering.adapters.schema_accounts import prices
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.domain.prices import PriceRule, Selector


class SqlPrices:
    """See `ports.PriceStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database

    async def rules(self) -> Sequence[PriceRule]:
        """See `PriceStore.rules`."""
        return await self._database.read("read prices", _rules)

    async def add(self, rules: Sequence[PriceRule], *, now_ms: int) -> int:
        """See `PriceStore.add`."""
        return await self._database.write("add prices", lambda connection: _add(connection, rules, now_ms))


def _rules(connection: Connection) -> list[PriceRule]:
    return [_rule(row) for row in connection.execute(select(prices).order_by(prices.c.number))]


def _rule(row: Row[Any]) -> PriceRule:
    price = Price(
        id=row.price_id,
        currency=row.currency,
        input=row.input,
        cached_input=row.cached_input,
        output=row.output,
        priority_class=row.priority_class,
        effective_from_ms=row.declared_from_ms,
    )
    selector = Selector(row.model, row.adapter, row.priority_class)
    return PriceRule(selector=selector, price=price, from_ms=row.from_ms, to_ms=row.to_ms, origin=row.origin)


def _add(connection: Connection, rules: Sequence[PriceRule], now_ms: int) -> int:
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    added = 0
    for rule in rules:
        statement = insert(prices).values(_columns(rule, now_ms)).on_conflict_do_nothing()
        added += connection.execute(statement.returning(prices.c.number)).first() is not None
    return added


def _columns(rule: PriceRule, now_ms: int) -> dict[str, Any]:
    price = rule.price
    return {
        **rule.selector._asdict(),
        "price_id": price.id,
        "currency": price.currency,
        "input": price.input,
        "cached_input": price.cached_input,
        "output": price.output,
        "from_ms": rule.from_ms,
        "to_ms": rule.to_ms,
        "declared_from_ms": price.effective_from_ms,
        "origin": rule.origin,
        "recorded_ms": now_ms,
    }

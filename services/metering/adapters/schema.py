"""The ledger's tables. Migrations make them; a contract test holds both to be the same.

Texts compare by code point on both databases, so that pages have one order. Amounts are exact: NUMERIC in PostgreSQL,
decimal text in SQLite, whose own sums would be floats (docs/decisions/0070-ledger.md).
"""

from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeEngine

from services.metering.domain.rating import money_text

metadata = MetaData()
TEXT = Text().with_variant(Text(collation="C"), "postgresql")
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")  # so that SQLite's row id is the sequence itself


class ExactDecimal(TypeDecorator[Decimal]):
    """A decimal of any length, never a float."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """NUMERIC where the database adds it exactly, else text."""
        return dialect.type_descriptor(Numeric() if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> Any:
        """To the database."""
        return value if value is None or dialect.name == "postgresql" else money_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Decimal | None:
        """From the database."""
        return None if value is None else Decimal(value)


class exact_add(GenericFunction[Decimal]):  # noqa: N801 - the name is the SQL function's
    """Sum of two `ExactDecimal` values; SQLite gets it from `database.add_exactly`."""

    type = ExactDecimal()
    inherit_cache = True


@compiles(exact_add, "postgresql")
def _postgresql_add(element: Any, compiler: Any, **options: Any) -> str:
    return " + ".join(compiler.process(clause, **options) for clause in element.clauses)


class exact_negative(GenericFunction[Decimal]):  # noqa: N801 - the name is the SQL function's
    """An `ExactDecimal` with the other sign; SQLite gets it from `database.negate_exactly`."""

    type = ExactDecimal()
    inherit_cache = True


@compiles(exact_negative, "postgresql")
def _postgresql_negative(element: Any, compiler: Any, **options: Any) -> str:
    return f"-{compiler.process(element.clauses, **options)}"


class exact_sum(GenericFunction[Decimal]):  # noqa: N801 - the name is the SQL function's
    """Sum of `ExactDecimal` values; SQLite gets it from `database.DecimalSum`."""

    type = ExactDecimal()
    inherit_cache = True


@compiles(exact_sum, "postgresql")
def _postgresql_sum(element: Any, compiler: Any, **options: Any) -> str:
    return f"sum({compiler.process(element.clauses, **options)})"


usage_rows = Table(
    "usage_rows",
    metadata,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=False),
    Column("revision", SmallInteger, nullable=False),
    Column("event_id", TEXT, nullable=False),
    Column("tenant_id", TEXT, nullable=False),
    Column("source", TEXT, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("request_id", TEXT, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("key_id", TEXT, nullable=False),
    Column("model", TEXT, nullable=False),
    Column("model_digest", TEXT, nullable=False),
    Column("adapter", TEXT, nullable=False),
    Column("adapter_digest", TEXT, nullable=False),
    Column("priority_class", TEXT, nullable=False),
    Column("outcome", TEXT, nullable=False),
    Column("status", BigInteger, nullable=False),
    Column("finish_reason", TEXT, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("counted_by", TEXT, nullable=False),
    Column("queue_ms", BigInteger, nullable=False),
    Column("stage_ms", BigInteger, nullable=False),
    Column("load_ms", BigInteger, nullable=False),
    Column("first_token_ms", BigInteger, nullable=False),
    Column("total_ms", BigInteger, nullable=False),
    Column("run_ms", BigInteger, nullable=False),
    Column("node_id", TEXT, nullable=False),
    Column("operation", TEXT, nullable=False),
    Column("emitter", TEXT, nullable=False),
    Column("price_id", TEXT, nullable=False),
    Column("currency", TEXT, nullable=False),
    Column("amount", ExactDecimal, nullable=False),
    Column("recorded_ms", BigInteger, nullable=False),
    Column("corrects_sequence", BigInteger),
    Column("superseded_by", BigInteger),
    Column("period_ms", BigInteger, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("reversal_ms", BigInteger),
    UniqueConstraint("event_id", "tenant_id", "source", "revision", name="usage_rows_once"),
    Index("usage_rows_tenant", "tenant_id", "sequence"),
    Index("usage_rows_time", "time_ms"),
)
Index(
    "usage_rows_superseded",
    usage_rows.c.superseded_by,
    sqlite_where=usage_rows.c.superseded_by.is_not(None),
    postgresql_where=usage_rows.c.superseded_by.is_not(None),
)

ledger_head = Table(
    "ledger_head",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("sequence", BigInteger, nullable=False),
    Column("open_from_ms", BigInteger, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("folded_sequence", BigInteger, nullable=False),
)
"""One row, id 1. Writers lock it, so sequences have no gaps and rise in the order of the commits. `open_from_ms` is the
first month that is not closed, `changes` counts erasures and removals, `folded_sequence` is how far hourly sums are."""

billing_outbox = Table(
    "billing_outbox",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("published_sequence", BigInteger, nullable=False),
    Column("holder", TEXT, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
    Column("turn", BigInteger, nullable=False),
)
"""One row, id 1: how far the billing stream is, and who may publish. `turn` counts how often it was begun again."""

quarantine = Table(
    "quarantine",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    Column("subject", TEXT, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("reason", TEXT, nullable=False),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("replayed_ms", BigInteger),
)

ONLY_ROW = 1
"""The id in the tables of one row."""

"""Rows of `usage_rows` to and from the domain's `LedgerRow`, column by column.

`column_values` reads all columns in one call: it runs for every event."""

from operator import attrgetter, itemgetter
from typing import Any, Final

from sqlalchemy import Row

from roundhouse.vocabulary import Outcome, PriorityClass
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.rating import Rating
from services.metering.domain.usage import UsageFacts

_SAME: Final = tuple(
    name for name in UsageFacts.__struct_fields__ if name not in ("priority_class", "outcome", "corrects_id")
)
_mapped_same = itemgetter(*_SAME)

INSERTED: Final = (
    *("sequence", "revision", "recorded_ms", "corrects_sequence"),
    *_SAME,
    *("priority_class", "outcome", "price_id", "currency", "amount"),
)
"""The columns of a new row, in the order of `column_values`; the others begin as NULL."""

column_values = attrgetter(
    *("sequence", "revision", "recorded_ms", "corrects_sequence"),
    *(f"facts.{name}" for name in _SAME),
    *("facts.priority_class._value_", "facts.outcome._value_"),
    *("rating.price_id", "rating.currency", "rating.amount"),
)
"""What to insert for a `LedgerRow`: one value a column of `INSERTED`; the amount, last, is a Decimal."""


def ledger_row(row: Row[Any]) -> LedgerRow:
    """The row that was read with all columns of `usage_rows`."""
    columns = row._mapping
    facts = UsageFacts(
        priority_class=PriorityClass(columns["priority_class"]),
        outcome=Outcome(columns["outcome"]),
        corrects_id="",  # an emitted event never has one; the billing record of a correction says what it corrects
        **dict(zip(_SAME, _mapped_same(columns), strict=True)),
    )
    return LedgerRow(
        sequence=columns["sequence"],
        revision=columns["revision"],
        facts=facts,
        rating=Rating(columns["price_id"], columns["currency"], columns["amount"]),
        recorded_ms=columns["recorded_ms"],
        corrects_sequence=columns["corrects_sequence"],
    )

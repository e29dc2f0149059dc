"""Rows of `usage_rows` to and from the domain's `LedgerRow`, column by column."""

from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any, Final

from sqlalchemy import Row

from roundhouse.vocabulary import Outcome, PriorityClass
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.rating import Rating
from services.metering.domain.usage import UsageFacts

_SAME: Final = tuple(
    field.name for field in fields(UsageFacts) if field.name not in ("priority_class", "outcome", "corrects_id")
)
_read_same = attrgetter(*_SAME)
_mapped_same = itemgetter(*_SAME)


def column_values(row: LedgerRow) -> dict[str, Any]:
    """What to insert for a row."""
    values: dict[str, Any] = dict(zip(_SAME, _read_same(row.facts), strict=True))
    values["sequence"] = row.sequence
    values["revision"] = row.revision
    values["priority_class"] = row.facts.priority_class.value
    values["outcome"] = row.facts.outcome.value
    values["emitter"] = str(row.facts.emitter)
    values["price_id"] = row.rating.price_id
    values["currency"] = row.rating.currency
    values["amount"] = row.rating.amount
    values["recorded_ms"] = row.recorded_ms
    values["corrects_sequence"] = row.corrects_sequence
    return values


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

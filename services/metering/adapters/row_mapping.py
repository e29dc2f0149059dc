"""Rows of `usage_rows` to and from the domain's `LedgerRow`, by position: this runs for every event.

Read with `READ` and written with `column_values`, both in the order of `STORED`.
"""

from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Row

from roundhouse.vocabulary import Outcome, PriorityClass
from services.metering.adapters.schema import usage_rows
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.rating import Rating
from services.metering.domain.usage import UsageFacts

_OF_ROW: Final = ("sequence", "revision", "recorded_ms", "corrects_sequence", "period_ms", "kind", "reversal_ms")
_OF_FACTS: Final = UsageFacts.__struct_fields__[:-1]
assert UsageFacts.__struct_fields__[-1] == "corrects_id", "an emitted event has none, so it has no column"
_OF_RATING: Final = ("price_id", "currency", "amount")
_FACTS_END: Final = len(_OF_ROW) + len(_OF_FACTS)
_ENUMS: Final = {"priority_class": "priority_class._value_", "outcome": "outcome._value_"}

STORED: Final = (*_OF_ROW, *_OF_FACTS, *_OF_RATING)
"""The columns of a new row; `superseded_by` begins as NULL."""

READ: Final = tuple(usage_rows.c[name] for name in STORED)
"""What to select for `ledger_row`."""

column_values = attrgetter(
    *_OF_ROW, *(f"facts.{_ENUMS.get(name, name)}" for name in _OF_FACTS), *(f"rating.{name}" for name in _OF_RATING)
)
"""What to insert for a `LedgerRow`: one value a column of `STORED`; the amount is a Decimal."""

_CLASS, _OUTCOME = STORED.index("priority_class"), STORED.index("outcome")


def ledger_row(row: Row[Any]) -> LedgerRow:
    """The row that was selected with `READ`."""
    values = list(row)
    values[_CLASS] = PriorityClass(values[_CLASS])
    values[_OUTCOME] = Outcome(values[_OUTCOME])
    values_of_facts: list[Any] = [*values[len(_OF_ROW) : _FACTS_END], ""]
    facts = UsageFacts(*values_of_facts)
    sequence, revision, *others = values[: len(_OF_ROW)]
    return LedgerRow(sequence, revision, facts, Rating(*values[_FACTS_END:]), *others)

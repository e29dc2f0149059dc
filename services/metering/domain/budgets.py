"""What tenants have spent of their budgets: exact sums by period, from ledger rows in ledger order.

Pure. A row counts in the period of its own time; a correction takes back what it corrects in the period of that one. So
the sums up to a sequence are a function of the ledger alone, whoever adds them up and in however many steps.
"""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from msgspec import Struct

from roundhouse.budgets import period_text
from roundhouse.catalogue.records import Budget
from services.metering.domain.rating import EXACT

PERCENTS: Final = (50, 80, 100)
"""Shares of a budget that are told."""
KINDS: Final = ("month", "day")


class Charge(Struct, frozen=True):
    """An amount of money at a time."""

    time_ms: int
    currency: str
    amount: Decimal


class SpendRow(Struct, frozen=True):
    """What a ledger row does to what a tenant has spent."""

    sequence: int
    tenant_id: str
    request_id: str
    charge: Charge
    replaced: Charge | None = None  # of the row that this one corrects


class PeriodKey(NamedTuple):
    """Whose sum, over which period, in which currency."""

    tenant_id: str
    period: str
    currency: str


SpendSums = dict[PeriodKey, Decimal]


def add_rows(sums: SpendSums, rows: Iterable[SpendRow]) -> set[PeriodKey]:
    """Add rows that follow those already in `sums`; returns what changed. O(n)."""
    changed: set[PeriodKey] = set()
    for row in rows:
        _add(sums, changed, row.tenant_id, row.charge, row.charge.amount)
        if row.replaced is not None:
            _add(sums, changed, row.tenant_id, row.replaced, row.replaced.amount.copy_negate())
    return changed


def _add(sums: SpendSums, changed: set[PeriodKey], tenant_id: str, charge: Charge, amount: Decimal) -> None:
    for kind in KINDS:
        key = PeriodKey(tenant_id, period_text(kind, charge.time_ms), charge.currency)
        sums[key] = EXACT.add(sums.get(key, Decimal(0)), amount)
        changed.add(key)


def forget_before(sums: SpendSums, time_ms: int) -> None:
    """Drop the sums of periods that had ended by `time_ms`."""
    oldest = {len(text): text for text in (period_text(kind, time_ms) for kind in KINDS)}
    for key in [key for key in sums if key.period < oldest[len(key.period)]]:
        del sums[key]


def reached(budget: Budget, spent: Decimal) -> Sequence[int]:
    """The shares of a budget that were reached, rising. A budget of nothing is reached by anything."""
    limit = Decimal(budget.amount)
    if not spent and not limit:
        return ()
    return [
        percent
        for percent in PERCENTS
        if EXACT.multiply(spent, Decimal(100)) >= EXACT.multiply(limit, Decimal(percent))
    ]

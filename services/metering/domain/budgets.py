"""What tenants have spent of their budgets: exact sums by period, from ledger rows in ledger order.

Pure. A row counts in the period of its own time; a correction takes back what it corrects in the period of that one. So
the sums up to a sequence are a function of the ledger alone, whoever adds them up and in however many steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from msgspec import Struct

from roundhouse.budgets import model_scope, period_text
from roundhouse.catalogue.records import EMPTY, Budget, Catalogue
from roundhouse.vocabulary import AdapterName, ModelName, TenantId
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
    key_id: str = ""
    name: str = ""  # that was called: the adapter's, or the model's


class PeriodKey(NamedTuple):
    """Whose sum, over which period, in which currency. `scope` "" is the whole tenant; see `Scopes`."""

    tenant_id: str
    period: str
    currency: str
    scope: str = ""


class Scopes(Struct, frozen=True):
    """Which keys and models have a budget of their own, so that their sums are kept beside the tenant's."""

    keys: Mapping[str, tuple[str, str]] = {}  # key id → tenant and scope, which a key shares with its successors
    catalogue: Catalogue = EMPTY

    def of(self, tenant_id: str, key_id: str, name: str) -> Sequence[str]:
        """The scopes that a row counts in, the tenant's first. O(patterns of the tenant)."""
        found = [""]
        of_key = self.keys.get(key_id)
        if of_key is not None and of_key[0] == tenant_id:
            found.append(of_key[1])
        if self._has_budget(tenant_id, name):
            found.append(model_scope(name))
        return found

    def _has_budget(self, tenant_id: str, name: str) -> bool:
        tenant = self.catalogue.tenants.get(TenantId(tenant_id))
        limits = tenant.model_limits(name) if tenant is not None else None
        if limits is None:
            adapter = self.catalogue.adapters.get(AdapterName(name))
            model = self.catalogue.models.get(adapter.base if adapter is not None else ModelName(name))
            limits = model.tenant_limits if model is not None else None
        return limits is not None and limits.budget is not None


NO_SCOPES: Final = Scopes()


SpendSums = dict[PeriodKey, Decimal]


def add_rows(sums: SpendSums, rows: Iterable[SpendRow], scopes: Scopes = NO_SCOPES) -> set[PeriodKey]:
    """Add rows that follow those already in `sums`; returns what changed. O(n)."""
    changed: set[PeriodKey] = set()
    for row in rows:
        for scope in scopes.of(row.tenant_id, row.key_id, row.name):
            _add(sums, changed, (row.tenant_id, scope), row.charge, row.charge.amount)
            if row.replaced is not None:
                _add(sums, changed, (row.tenant_id, scope), row.replaced, row.replaced.amount.copy_negate())
    return changed


def _add(sums: SpendSums, changed: set[PeriodKey], whose: tuple[str, str], charge: Charge, amount: Decimal) -> None:
    for kind in KINDS:
        key = PeriodKey(whose[0], period_text(kind, charge.time_ms), charge.currency, whose[1])
        add_sum(sums, key, amount)
        changed.add(key)


def add_sum(sums: SpendSums, key: PeriodKey, amount: Decimal) -> None:
    """Add to one sum, exactly."""
    sums[key] = EXACT.add(sums.get(key, Decimal(0)), amount)


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

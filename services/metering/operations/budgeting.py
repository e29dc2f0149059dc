"""From the ledger to the budgets that gateways check, and the alerts: soon after each commit, in ledger order.

Every metering process follows the ledger by itself; what they write is a function of the ledger, and the store takes
only what is newer, so they need not know of each other. Keys and models with budgets of their own have sums beside
their tenant's; which those are is asked after each reading of the ledger, because a key is known before it works. A
store that forgot is told everything again. Money is added in exact decimals; the store gets micro-units, rounded up.
Decision: docs/decisions/0111-budgets.md.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final

import structlog
from msgspec.structs import replace

from roundhouse.budgets import period_text
from roundhouse.catalogue.records import Budget, Tenant
from roundhouse.clock import Clock
from roundhouse.vocabulary import TenantId
from roundhouse.wire.v1.usage_pb2 import BudgetAlert
from services.metering.domain.budgets import PeriodKey, Scopes, SpendRow, SpendSums, add_rows, forget_before, reached
from services.metering.domain.rating import money_text
from services.metering.ports import BudgetAlerts, BudgetStore, PriceSource, SpendLedger, TenantSpend

log = structlog.get_logger(__name__)

TURN_MS: Final = 500  # with what a trickle of rows waits (250 ms) and a commit well within the 2 s that are promised
PAGE_ROWS: Final = 5_000
RELEASED_ROWS_MAX: Final = 50_000  # a guess: what more than that reserved ends by itself within the hour

Whose = tuple[str, str]  # tenant and scope
Counted = list[tuple[int, str]]  # sequence of the row, request id


class BudgetFeed:
    """Turns for `Lifecycle.every`. Raises Unavailable; the next turn goes on where this one stopped."""

    def __init__(
        self, ledger: SpendLedger, store: BudgetStore, alerts: BudgetAlerts, prices: PriceSource, clock: Clock
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._alerts = alerts
        self._catalogue = prices
        self._clock = clock
        self._sequence = 0  # up to which `_sums` are, if `_basis` is today's
        self._sums: SpendSums = {}
        self._scopes = Scopes()
        self._told: set[tuple[str, str, int]] = set()  # (tenant, period, percent)
        self._due: set[TenantId] = set()  # whose spend changed since their alerts were last looked at
        self._basis: tuple[int, str] | None = None  # catalogue generation and day of the last full count

    async def turn(self) -> None:
        """Write what is new in the ledger, page by page; then the alerts."""
        known = await self._store.known()
        if known is None or self._basis != self._basis_now():
            await self._tell_all(known)
            return
        while True:
            page = await self._ledger.following(self._sequence, limit=PAGE_ROWS)
            if not page.rows:
                await self._alert()  # those that the bus did not take
                return
            await self._tell_news(page.rows)
            if page.rows[-1].sequence >= page.head:
                return

    def _basis_now(self) -> tuple[int, str]:
        """What a full count depends on: which tenants have budgets, and which periods are not over."""
        return self._catalogue.current.generation, period_text("day", self._clock.now_ms())

    async def _tell_all(self, known: int | None) -> None:
        basis = self._basis_now()
        sequence = await self._sum_all()
        rows = await self._rows_between(known, sequence)
        tenants = self._budgeted()
        whose = {(tenant.name, "") for tenant in tenants} | _scoped(self._sums)
        await self._store.write(self._spends(whose, sequence, self._counted(rows)))
        await self._store.remember(sequence)
        self._sequence, self._basis = sequence, basis
        self._due.update(tenant.name for tenant in tenants)
        await self._alert()

    async def _sum_all(self) -> int:
        """Sum the ledger; returns up to which row. Again if a key was made meanwhile: its rows may be in there."""
        while True:
            self._scopes = Scopes(await self._store.key_scopes(), self._catalogue.current)
            sequence, self._sums = await self._ledger.sums(self._clock.now_ms(), self._scopes)
            if await self._store.key_scopes() == self._scopes.keys:
                return sequence

    async def _rows_between(self, known: int | None, last: int) -> Sequence[SpendRow]:
        """What nobody told the store of while no process of ours ran: their reservations are to be given back."""
        rows: list[SpendRow] = []
        while known is not None and known < last and len(rows) < RELEASED_ROWS_MAX:
            page = await self._ledger.following(known, limit=PAGE_ROWS)
            rows += [row for row in page.rows if row.sequence <= last]
            known = page.rows[-1].sequence if page.rows else last
        return rows

    async def _tell_news(self, rows: Sequence[SpendRow]) -> None:
        before, self._sums = self._sums, dict(self._sums)
        try:
            self._scopes = replace(self._scopes, keys=await self._store.key_scopes())
            changed = add_rows(self._sums, rows, self._scopes)
            forget_before(self._sums, self._clock.now_ms())
            names = {key.tenant_id for key in changed}
            tenants = [tenant for tenant in self._budgeted() if tenant.name in names]
            whose = {(tenant.name, "") for tenant in tenants} | _scoped(changed)
            last = rows[-1].sequence
            await self._store.write(self._spends(whose, last, self._counted(rows)))
            await self._store.remember(last)
        except BaseException:
            self._sums = before  # the turn is made again
            raise
        self._sequence = last
        self._due.update(tenant.name for tenant in tenants)
        await self._alert()

    def _budgeted(self) -> list[Tenant]:
        return [tenant for tenant in self._catalogue.current.tenants.values() if tenant.budget is not None]

    def _spends(self, whose: Iterable[Whose], sequence: int, counted: Mapping[Whose, Counted]) -> list[TenantSpend]:
        sums: dict[Whose, dict[tuple[str, str], Decimal]] = {each: {} for each in whose}
        for key, amount in self._sums.items():
            own = sums.get((key.tenant_id, key.scope))
            if own is not None:
                own[key.period, key.currency] = amount
        return [
            TenantSpend(name, sequence, own, tuple(counted.get((name, scope), ())), scope)
            for (name, scope), own in sums.items()
        ]

    def _counted(self, rows: Iterable[SpendRow]) -> dict[Whose, Counted]:
        """The requests whose cost is in the sums now. An attempt that cost nothing says nothing of a request's end."""
        counted: dict[Whose, Counted] = defaultdict(list)
        for row in rows:
            if row.charge.amount > 0:
                for scope in self._scopes.of(row.tenant_id, row.key_id, row.name):
                    counted[row.tenant_id, scope].append((row.sequence, row.request_id))
        return counted

    async def _alert(self) -> None:
        for name in sorted(self._due):
            tenant = self._catalogue.current.tenants.get(name)
            if tenant is not None and tenant.budget is not None:
                await self._alert_of(tenant, tenant.budget)
            self._due.discard(name)

    async def _alert_of(self, tenant: Tenant, budget: Budget) -> None:
        now_ms = self._clock.now_ms()
        period = period_text(budget.period, now_ms)
        spent = self._sums.get(PeriodKey(tenant.name, period, budget.currency), Decimal(0))
        for percent in reached(budget, spent):
            told = (tenant.name, period, percent)
            if told in self._told:
                continue
            alert = BudgetAlert(
                tenant_id=tenant.name,
                period=period,
                percent=percent,
                spent=money_text(spent),
                budget=budget.amount,
                currency=budget.currency,
                sequence=self._sequence,
                time_unix_ms=now_ms,
            )
            if await self._alerts.tell(alert):
                log.info("budget_alert", tenant_id=tenant.name, period=period, percent=percent)
            self._told.add(told)


def _scoped(keys: Iterable[PeriodKey]) -> set[Whose]:
    """The keys and models among them."""
    return {(key.tenant_id, key.scope) for key in keys if key.scope}

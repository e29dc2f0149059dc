"""Rates recorded events again, by the prices that hold now for their own time, through corrections only.

A rerun finds nothing left to correct, so it may be stopped and repeated at any point. Rows of erased tenants stay as
they are: what would choose their price is gone.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal

from roundhouse.clock import Clock
from services.metering.domain.rating import EXACT
from services.metering.money_ports import Pricing, RatingPage, Rerated, Rerating


@dataclass(slots=True)
class RerateReport:
    """What was, or would be, corrected. `difference` is new less old, by currency."""

    examined: int = 0
    corrected: int = 0
    difference: dict[str, Decimal] = field(default_factory=dict)
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)  # (old price id, new one) → rows

    def add(self, page: Rerated) -> None:
        """Take in one page."""
        self.examined += page.examined
        self.corrected += len(page.changes)
        for old, new in page.changes:
            self.moves[old.price_id, new.price_id] += 1
            for currency, amount in ((old.currency, old.amount.copy_negate()), (new.currency, new.amount)):
                self.difference[currency] = EXACT.add(self.difference.get(currency, Decimal(0)), amount)


async def rerate_period(rerating: Rerating, pricing: Pricing, clock: Clock, page: RatingPage) -> RerateReport:
    """Every row of the period, page by page. Raises Unavailable; what was corrected until then stays."""
    report = RerateReport()
    book = await pricing.book()
    while True:
        done = await rerating.rerate(page, book, now_ms=clock.now_ms())
        report.add(done)
        if done.next_after is None:
            return report
        page = replace(page, after=done.next_after)

"""Operators' prices: new versions are added, nothing that exists is changed. Applied again, nothing happens."""

from collections.abc import Sequence

from roundhouse.clock import Clock
from roundhouse.errors import Conflict
from services.metering.domain.prices import PriceRule, same_content
from services.metering.money_ports import PriceStore


async def apply_prices(
    store: PriceStore, rules: Sequence[PriceRule], clock: Clock, *, dry_run: bool
) -> Sequence[PriceRule]:
    """Add what is new; which that is, or would be. Raises Conflict if an id or an instant is taken by other content."""
    known = list(await store.rules())
    news: list[PriceRule] = []
    for rule in rules:
        if not _is_known(rule, [*known, *news]):
            news.append(rule)
    if news and not dry_run:
        await store.add(news, now_ms=clock.now_ms())
    return news


def _is_known(rule: PriceRule, known: Sequence[PriceRule]) -> bool:
    for other in known:
        if other.price.id == rule.price.id and not same_content(other.price, rule.price):
            raise Conflict(
                f"the price id {rule.price.id!r} is taken by other amounts: give the new price an id of its own"
            )
        if (other.selector, other.from_ms) == (rule.selector, rule.from_ms):
            if same_content(other.price, rule.price) and other.to_ms == rule.to_ms:
                return True
            raise Conflict(f"{rule.price.id!r}: another price takes effect at that instant: choose a later one")
    return False

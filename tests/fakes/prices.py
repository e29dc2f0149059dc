"""Prices in memory: a store of rules, and a catalogue that tests set."""

from collections.abc import Sequence

from roundhouse.catalogue.records import Catalogue
from services.metering.domain.prices import PriceRule
from services.metering.operations.pricing import PriceKeeper
from tests.fakes.clock import ManualClock


class SetCatalogue:
    """A `PriceSource` that tests set."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.current = catalogue
        self.not_ready_reason: str | None = None


class FakePrices:
    """See `ports.PriceStore`."""

    def __init__(self) -> None:
        self._rules: list[PriceRule] = []

    async def rules(self) -> Sequence[PriceRule]:
        """See `PriceStore.rules`."""
        return list(self._rules)

    async def add(self, rules: Sequence[PriceRule], *, now_ms: int) -> int:
        """See `PriceStore.add`."""
        taken = {(rule.selector, rule.from_ms) for rule in self._rules}
        new = [rule for rule in rules if (rule.selector, rule.from_ms) not in taken]
        self._rules += new
        return len(new)


def pricing(catalogue: Catalogue) -> PriceKeeper:
    """What rates by a catalogue alone."""
    return PriceKeeper(SetCatalogue(catalogue), FakePrices(), ManualClock())

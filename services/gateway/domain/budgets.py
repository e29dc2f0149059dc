"""What a request may cost at most, and whether a tenant's budget has room for it. Pure.

Prices are per million tokens, so tokens × price are micro-units, exactly. Which price version applies is decided when
the request has ended; until then the dearest of those that can apply is reserved (docs/decisions/0111-budgets.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache

from roundhouse.budgets import MICRO_MAX, micro_down, period_text
from roundhouse.catalogue.records import Adapter, Budget, Model, Price
from roundhouse.vocabulary import PriorityClass

TARIFFS_REMEMBERED = 4096  # a guess: models × classes of a large catalogue
HOLD_MS = 30_000  # as the concurrency lease: a gateway that died gives its reservations back within this time
SETTLED_HOLD_MS = 3_600_000  # how long a cost is held until the ledger has it; a bus that is away longer is an outage


@dataclass(frozen=True, slots=True)
class Tariff:
    """The dearest prices of one million tokens that can apply."""

    input: Decimal = Decimal(0)
    cached_input: Decimal = Decimal(0)
    output: Decimal = Decimal(0)

    def cost_micro(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Micro-units of so many tokens, rounded up."""
        exact = self.input * (input_tokens - cached_tokens) + self.cached_input * cached_tokens
        exact += self.output * output_tokens
        return min(MICRO_MAX, int(exact.to_integral_value(ROUND_CEILING)))

    def worst_micro(self, input_tokens: int, output_tokens: int) -> int:
        """The most that a request can cost, whatever of its prompt comes from the cache."""
        cached = input_tokens if self.cached_input > self.input else 0
        return self.cost_micro(input_tokens, cached, output_tokens)


@dataclass(frozen=True, slots=True)
class Money:
    """What one request asks of one budget: its tenant's, its key's or that of the model for its tenant."""

    budget: Budget
    period: str
    cost_micro: int  # at most
    tariff: Tariff
    scope: str = ""  # as `limits.ScopedLimits`

    @property
    def limit_micro(self) -> int:
        """The budget, rounded down."""
        return micro_down(Decimal(self.budget.amount))


def tariff_of(model: Model, adapter: Adapter | None, priority_class: PriorityClass, currency: str) -> Tariff:
    """The tariff of a model, or of an adapter that has prices of its own, in one currency."""
    own = _prices(adapter) if adapter is not None else ()
    return _dearest((*own, *(() if own else _prices(model))), priority_class, currency)


def _prices(priced: Model | Adapter) -> tuple[Price, ...]:
    return (*((priced.price,) if priced.price is not None else ()), *priced.prices)


@lru_cache(TARIFFS_REMEMBERED)
def _dearest(prices: tuple[Price, ...], priority_class: PriorityClass, currency: str) -> Tariff:
    found = [each for each in prices if each.currency == currency and each.priority_class in ("", priority_class.value)]
    return Tariff(
        max((Decimal(each.input) for each in found), default=Decimal(0)),
        max((Decimal(each.cached_input) for each in found), default=Decimal(0)),
        max((Decimal(each.output) for each in found), default=Decimal(0)),
    )


def money_of(
    budget: Budget, tariff: Tariff, *, input_tokens: int, max_output_tokens: int, now_ms: int, scope: str = ""
) -> Money:
    """What a request with these limits asks. `now_ms` is Unix time."""
    worst_micro = tariff.worst_micro(input_tokens, max_output_tokens)
    return Money(budget, period_text(budget.period, now_ms), worst_micro, tariff, scope)


@dataclass(frozen=True, slots=True)
class Refused:
    """There is not enough left. In micro-units; `left` may be below zero."""

    cost: int
    left: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Purse:
    """The money of one scope in one period: the twin of what budget.lua keeps."""

    spent: int = 0
    holds: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # request → (micro-units, ends at ms)

    @property
    def reserved(self) -> int:
        """Of all requests that are not in `spent` yet."""
        return sum(amount for amount, _ in self.holds.values())

    def at(self, now_ms: int) -> "Purse":
        """Without reservations that have ended."""
        return replace(self, holds={name: hold for name, hold in self.holds.items() if hold[1] > now_ms})

    def admit(self, request_id: str, cost: int, limit: int, now_ms: int) -> "Purse | Refused":
        """Reserve the most that a request may cost."""
        purse = self.at(now_ms)
        left = limit - purse.spent - purse.reserved
        if cost > left:
            return Refused(cost, left, purse.reserved)
        return purse._with(request_id, cost, now_ms + HOLD_MS)

    def renew(self, request_id: str, now_ms: int) -> "Purse":
        """The request still runs."""
        held = self.holds.get(request_id)
        return self if held is None else self._with(request_id, held[0], now_ms + HOLD_MS)

    def settle(self, request_id: str, cost: int, now_ms: int) -> "Purse":
        """The request ended: what it cost is held until the ledger counts it. Nothing if that has happened."""
        return self._with(request_id, cost, now_ms + SETTLED_HOLD_MS) if request_id in self.holds else self

    def count(self, request_id: str, cost: int) -> "Purse":
        """The ledger has what the request cost."""
        return replace(self._with(request_id, 0, 0), spent=self.spent + cost)

    def _with(self, request_id: str, amount: int, ends_ms: int) -> "Purse":
        others = {name: hold for name, hold in self.holds.items() if name != request_id}
        return replace(self, holds={**others, request_id: (amount, ends_ms)} if amount else others)

"""What an event costs at a price: exact decimal arithmetic, no rounding, no state. Which price applies: `prices`.

Prices are per million tokens. Tokens reused from the cache are priced as `cached_input`, the rest of the input as
`input`. Without a price the amount is 0 and the price id empty, so that such rows can be found.
"""

from collections.abc import Iterable
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from functools import lru_cache
from typing import Final

from msgspec import Struct

from roundhouse.catalogue.records import Price
from services.metering.domain.usage import UsageFacts

_PER_TOKENS: Final = Decimal(1_000_000)
EXACT: Final = Context(prec=80, traps=[InvalidOperation, DivisionByZero, Overflow, Inexact])
"""For all arithmetic with money. Three products of uint32 by a price of 30 digits, summed over every row that there can
be, still fit; what would be rounded raises instead."""
_PRICES_REMEMBERED: Final = 1024  # as many as a catalogue has; a guess
NO_CURRENCY: Final = ""


class Rating(Struct, frozen=True, gc=False):
    """A price applied to one event."""

    price_id: str  # empty = there was no price
    currency: str
    amount: Decimal


UNRATED: Final = Rating("", NO_CURRENCY, Decimal(0))


def rate(facts: UsageFacts, price: Price | None) -> Rating:
    """Uncached input, cached input and output tokens, each by its price per million. Exact."""
    if price is None:
        return UNRATED
    fresh, cached, output = _per_token(price)
    amount = EXACT.multiply(fresh, facts.input_tokens - facts.cached_tokens)
    amount = EXACT.fma(cached, facts.cached_tokens, amount)
    amount = EXACT.fma(output, facts.output_tokens, amount)
    return Rating(price.id, price.currency, amount)


@lru_cache(_PRICES_REMEMBERED)
def _per_token(price: Price) -> tuple[Decimal, Decimal, Decimal]:
    fresh, cached, output = (
        EXACT.divide(Decimal(text), _PER_TOKENS) for text in (price.input, price.cached_input, price.output)
    )
    return fresh, cached, output


def sum_of(amounts: Iterable[Decimal]) -> Decimal:
    """The exact sum; 0 of none."""
    total = Decimal(0)
    for amount in amounts:
        total = EXACT.add(total, amount)
    return total


def money_text(amount: Decimal) -> str:
    """The shortest plain decimal string of an amount: "0", "0.0125", "100"; never an exponent."""
    if not amount:
        return "0"
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text

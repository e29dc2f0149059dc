"""What an event costs: exact decimal arithmetic, no rounding, no state.

Prices are per million tokens. Tokens reused from the cache are priced as `cached_input`, the rest of the input as
`input`. Without a price the amount is 0 and the price id empty, so that such rows can be found.
"""

from decimal import Context, Decimal
from functools import lru_cache
from typing import Final

from msgspec import Struct

from roundhouse.catalogue.records import Catalogue, Price
from roundhouse.vocabulary import AdapterName, ModelName
from services.metering.domain.usage import UsageFacts

_PER_TOKENS: Final = Decimal(1_000_000)
_EXACT: Final = Context(prec=80)  # three products of uint32 by a price of 30 digits, summed, still fit: nothing rounds
_PRICES_REMEMBERED: Final = 1024  # as many as a catalogue has; a guess
NO_CURRENCY: Final = ""


class Rating(Struct, frozen=True, gc=False):
    """A price applied to one event."""

    price_id: str  # empty = there was no price
    currency: str
    amount: Decimal


UNRATED: Final = Rating("", NO_CURRENCY, Decimal(0))


def price_of(catalogue: Catalogue, facts: UsageFacts) -> Price | None:
    """The price for an event: its adapter's own, else its model's, else None. O(1)."""
    if facts.adapter:
        adapter = catalogue.adapters.get(AdapterName(facts.adapter))
        if adapter is not None and adapter.price is not None:
            return adapter.price
    model = catalogue.models.get(ModelName(facts.model))
    return model.price if model is not None else None


def rate(facts: UsageFacts, price: Price | None) -> Rating:
    """Uncached input, cached input and output tokens, each by its price per million. Exact."""
    if price is None:
        return UNRATED
    fresh, cached, output = _per_token(price)
    amount = _EXACT.multiply(fresh, facts.input_tokens - facts.cached_tokens)
    amount = _EXACT.fma(cached, facts.cached_tokens, amount)
    amount = _EXACT.fma(output, facts.output_tokens, amount)
    return Rating(price.id, price.currency, amount)


@lru_cache(_PRICES_REMEMBERED)
def _per_token(price: Price) -> tuple[Decimal, Decimal, Decimal]:
    fresh, cached, output = (
        _EXACT.divide(Decimal(text), _PER_TOKENS) for text in (price.input, price.cached_input, price.output)
    )
    return fresh, cached, output


def money_text(amount: Decimal) -> str:
    """The shortest plain decimal string of an amount: "0", "0.0125", "100"; never an exponent."""
    if not amount:
        return "0"
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text

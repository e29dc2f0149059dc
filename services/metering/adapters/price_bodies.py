"""Prices in JSON: what `POST /v1/prices` takes and `GET /v1/prices` gives. Checked here, converted once."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from roundhouse.catalogue.records import Price
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import PriorityClass
from services.metering.domain.periods import instant_text, parse_instant
from services.metering.domain.prices import APPLIED, PriceRule, Selector

DECIMALS_MAX: Final = 12  # as in the catalogue: keeps every amount exact
AMOUNT_MAX: Final = 1_000_000_000
RULES_MAX: Final = 10_000


class PriceBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One rule. `from` is when it takes effect; amounts are decimal texts a million tokens."""

    id: str
    from_: str = msgspec.field(name="from")
    to: str = ""
    model: str = ""
    adapter: str = ""
    class_: str = msgspec.field(name="class", default="")
    currency: str = "USD"
    input: str = "0"
    cached_input: str = "0"
    output: str = "0"


class PricesBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/prices."""

    prices: list[PriceBody]
    dry_run: bool = False


def rules_of(bodies: Sequence[PriceBody]) -> list[PriceRule]:
    """Checked rules. Raises InvalidInput, naming the price and the field."""
    if len(bodies) > RULES_MAX:
        raise InvalidInput(f"at most {RULES_MAX} prices at once", param="prices")
    return [_rule(body, f"prices[{place}]") for place, body in enumerate(bodies)]


def _rule(body: PriceBody, where: str) -> PriceRule:
    if not body.id or len(body.id) > 128:
        raise InvalidInput("a price needs an id of up to 128 characters", param=f"{where}.id")
    if body.class_ and body.class_ not in [known.value for known in PriorityClass]:
        raise InvalidInput("class must be interactive, standard or batch", param=f"{where}.class")
    if not (len(body.currency) == 3 and body.currency.isascii() and body.currency.isupper()):
        raise InvalidInput("currency must be three capital letters", param=f"{where}.currency")
    from_ms, to_ms = _instant(body.from_, f"{where}.from"), _instant(body.to, f"{where}.to") if body.to else None
    if to_ms is not None and to_ms <= from_ms:
        raise InvalidInput("to must be later than from", param=f"{where}.to")
    amounts = {name: _amount(getattr(body, name), f"{where}.{name}") for name in ("input", "cached_input", "output")}
    price = Price(id=body.id, currency=body.currency, priority_class=body.class_, effective_from_ms=from_ms, **amounts)
    selector = Selector(body.model, body.adapter, body.class_)
    return PriceRule(selector=selector, price=price, from_ms=from_ms, to_ms=to_ms, origin=APPLIED)


def _instant(text: str, where: str) -> int:
    found = parse_instant(text)
    if found is None:
        raise InvalidInput("must be a date, an RFC 3339 time with an offset, or Unix milliseconds", param=where)
    return found


def _amount(text: str, where: str) -> str:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise InvalidInput("must be a decimal number", param=where) from None
    if not amount.is_finite() or not 0 <= amount <= AMOUNT_MAX or amount != round(amount, DECIMALS_MAX):
        raise InvalidInput(f"must be from 0 to {AMOUNT_MAX} with at most {DECIMALS_MAX} decimals", param=where)
    return format(amount, "f")


def rule_json(rule: PriceRule) -> dict[str, Any]:
    """One version, as it is kept."""
    return {
        "id": rule.price.id,
        "model": rule.selector.model,
        "adapter": rule.selector.adapter,
        "class": rule.selector.priority_class,
        "currency": rule.price.currency,
        "input": rule.price.input,
        "cached_input": rule.price.cached_input,
        "output": rule.price.output,
        "from": instant_text(rule.from_ms),
        "to": None if rule.to_ms is None else instant_text(rule.to_ms),
        "origin": rule.origin,
    }

"""Which price applies, and what it makes."""

from decimal import Decimal

import pytest

from roundhouse.catalogue.records import Price
from services.metering.domain.ledger import Candidate, RawEvent, Rejected
from services.metering.domain.prices import PriceBook, PriceRule, Selector
from services.metering.domain.rating import UNRATED, money_text, rate
from services.metering.operations.recording import rated_item
from tests.builders.usage import AMOUNT, PRICE, usage_facts


def test_cached_input_has_its_own_price() -> None:
    """600 × 3 + 400 × 0.3 + 200 × 15 = 4,920 per million."""
    assert rate(usage_facts(), PRICE).amount == AMOUNT


def test_without_a_price_the_amount_is_zero_and_the_price_id_empty() -> None:
    """So that such rows can be found."""
    assert rate(usage_facts(), None) == UNRATED
    assert (money_text(UNRATED.amount), UNRATED.price_id) == ("0", "")


@pytest.mark.parametrize(
    ("amount", "text"), [("0", "0"), ("100", "100"), ("1E+3", "1000"), ("0.0120", "0.012"), ("1E-12", "0.000000000001")]
)
def test_money_is_written_plainly(amount: str, text: str) -> None:
    """Never an exponent, never a trailing zero."""
    assert money_text(Decimal(amount)) == text


def test_a_price_that_is_no_number_puts_the_event_aside_for_later() -> None:
    """It neither ends the process nor books a wrong amount; replaying after the correction records it."""
    raw = RawEvent("s", b"")
    broken = PriceBook([PriceRule(selector=Selector("m1"), price=Price(id="p3", input="3 USD"), from_ms=0)])
    item = rated_item(usage_facts(), raw, broken)
    assert item == Rejected(raw, "a price of 'p3' is no decimal number")
    good = PriceBook([PriceRule(selector=Selector("m1"), price=PRICE, from_ms=0)])
    assert isinstance(rated_item(usage_facts(), raw, good), Candidate)


def test_what_would_be_rounded_is_put_aside() -> None:
    """A price of 90 digits times a count is more than the arithmetic holds exactly."""
    long = PriceBook([PriceRule(selector=Selector("m1"), price=Price(id="p4", input="1." + "7" * 90), from_ms=0)])
    assert isinstance(rated_item(usage_facts(), RawEvent("s", b""), long), Rejected)

"""Which price applies, and what it makes."""

from decimal import Decimal

import msgspec
import pytest
from msgspec.structs import replace

from roundhouse.catalogue.records import Adapter, Catalogue, Price
from roundhouse.vocabulary import AdapterName, Digest, ModelName
from services.metering.domain.ledger import Candidate, RawEvent, Rejected
from services.metering.domain.rating import UNRATED, money_text, price_of, rate
from services.metering.operations.recording import rated_item
from tests.builders.usage import AMOUNT, PRICE, priced_catalogue, usage_facts

ADAPTER = Adapter(
    name=AdapterName("a1"), base=ModelName("m1"), source_path="/a1", digest=Digest("sha256:22"), price=Price(id="p2")
)


def test_cached_input_has_its_own_price() -> None:
    """600 × 3 + 400 × 0.3 + 200 × 15 = 4,920 per million."""
    assert rate(usage_facts(), PRICE).amount == AMOUNT


def test_without_a_price_the_amount_is_zero_and_the_price_id_empty() -> None:
    """So that such rows can be found."""
    assert rate(usage_facts(), None) == UNRATED
    assert (money_text(UNRATED.amount), UNRATED.price_id) == ("0", "")


def test_an_adapters_own_price_goes_before_its_models() -> None:
    """An adapter without a price is priced as its base; an unknown model has no price."""
    catalogue = priced_catalogue()
    with_adapter = msgspec.structs.replace(catalogue, adapters={ADAPTER.name: ADAPTER})
    priceless = msgspec.structs.replace(
        catalogue, adapters={ADAPTER.name: msgspec.structs.replace(ADAPTER, price=None)}
    )
    facts = usage_facts()
    assert price_of(with_adapter, facts) == ADAPTER.price
    assert price_of(priceless, facts) == PRICE
    assert price_of(catalogue, replace(facts, adapter="")) == PRICE
    assert price_of(catalogue, replace(facts, model="m9")) is None


@pytest.mark.parametrize(
    ("amount", "text"), [("0", "0"), ("100", "100"), ("1E+3", "1000"), ("0.0120", "0.012"), ("1E-12", "0.000000000001")]
)
def test_money_is_written_plainly(amount: str, text: str) -> None:
    """Never an exponent, never a trailing zero."""
    assert money_text(Decimal(amount)) == text


def test_a_price_that_is_no_number_puts_the_event_aside_for_later() -> None:
    """It neither ends the process nor books a wrong amount; replaying after the correction records it."""
    raw = RawEvent("s", b"")
    broken = msgspec.structs.replace(priced_catalogue().models[ModelName("m1")], price=Price(id="p3", input="3 USD"))
    catalogue = Catalogue(generation=2, models={broken.name: broken})
    item = rated_item(usage_facts(), raw, catalogue)
    assert item == Rejected(raw, "a price of 'p3' is no decimal number")
    assert isinstance(rated_item(usage_facts(), raw, priced_catalogue()), Candidate)

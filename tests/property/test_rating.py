"""Rating is exact and adds up."""

from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from roundhouse.catalogue.records import Price
from services.metering.domain.rating import money_text, rate
from services.metering.domain.usage import COUNT_MAX, UsageFacts
from tests.builders.usage import usage_facts

prices = st.decimals(0, 10**6, places=9).map(str)


@st.composite
def counted(draw: st.DrawFn) -> UsageFacts:
    """An event with any valid counts."""
    cached, rest = draw(st.integers(0, COUNT_MAX // 2)), draw(st.integers(0, COUNT_MAX // 2))
    return usage_facts(input_tokens=cached + rest, cached_tokens=cached, output_tokens=draw(st.integers(0, COUNT_MAX)))


@given(counted(), prices, prices, prices)
def test_the_amount_is_the_exact_product(facts: UsageFacts, fresh: str, cached: str, output: str) -> None:
    """No rounding anywhere: the amount equals the fraction, also after its text is read back."""
    price = Price(id="p", input=fresh, cached_input=cached, output=output)
    exact = (
        (facts.input_tokens - facts.cached_tokens) * Fraction(fresh)
        + facts.cached_tokens * Fraction(cached)
        + facts.output_tokens * Fraction(output)
    ) / 1_000_000
    amount = rate(facts, price).amount
    assert Fraction(amount) == exact
    assert Fraction(money_text(amount)) == exact


@given(counted(), prices)
def test_more_cache_never_costs_more_where_cached_input_is_cheaper(facts: UsageFacts, fresh: str) -> None:
    """With cached input at half the price, reuse only lowers the amount."""
    price = Price(id="p", input=fresh, cached_input=str(Decimal(fresh) / 2))
    without = rate(replace(facts, cached_tokens=0), price).amount
    assert rate(facts, price).amount <= without

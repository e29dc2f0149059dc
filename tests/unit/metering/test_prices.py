"""Which price applies: the most specific, as of the event's own time; how declared prices become versions."""

import msgspec
import pytest
from msgspec.structs import replace

from roundhouse.catalogue.records import Adapter, Catalogue, Price
from roundhouse.vocabulary import AdapterName, Digest, ModelName, PriorityClass
from services.metering.domain.prices import ANY, PriceBook, PriceRule, Selector, declared_rules
from services.metering.operations.pricing import PriceKeeper
from tests.builders.usage import PRICE, TIME_MS, priced_catalogue, usage_facts
from tests.fakes.clock import ManualClock
from tests.fakes.prices import FakePrices, SetCatalogue


def rule(price_id: str, from_ms: int = 0, to_ms: int | None = None, **selector: str) -> PriceRule:
    """A rule whose price is known by its id."""
    return PriceRule(selector=Selector(**selector), price=Price(id=price_id), from_ms=from_ms, to_ms=to_ms)


def found(book: PriceBook, **changes: object) -> str | None:
    """The price id for an interactive event of model m1 and adapter a1 at `TIME_MS`, with changes."""
    wanted = book.rule_for(replace(usage_facts(), **changes))
    return None if wanted is None else wanted.price.id


BY_RANK = [
    rule("model+adapter+class", model="m1", adapter="a1", priority_class="interactive"),
    rule("model+adapter", model="m1", adapter="a1"),
    rule("adapter+class", adapter="a1", priority_class="interactive"),
    rule("adapter", adapter="a1"),
    rule("model+class", model="m1", priority_class="interactive"),
    rule("model", model="m1"),
    rule("class", priority_class="interactive"),
    rule("everything"),
]


@pytest.mark.parametrize("rank", range(len(BY_RANK)))
def test_the_most_specific_rule_wins(rank: int) -> None:
    """Each rank wins over all less specific ones, in whatever order they were written."""
    assert found(PriceBook([*BY_RANK[:rank:-1], BY_RANK[rank]])) == BY_RANK[rank].price.id


def test_rules_of_others_do_not_apply() -> None:
    """Another model, adapter or class; and an event without an adapter never meets an adapter's rule."""
    book = PriceBook([rule("x", model="m2"), rule("y", adapter="a2"), rule("z", priority_class="batch")])
    assert found(book) is None
    assert found(book, priority_class=PriorityClass.BATCH) == "z"
    assert found(PriceBook([rule("base", model="m1"), rule("tuned", adapter="a1")]), adapter="") == "base"


def test_the_events_own_time_chooses_the_version() -> None:
    """[from, next from): the version in force at the instant; before the first there is none."""
    book = PriceBook([rule("old", 1_000, model="m1"), rule("new", 2_000, model="m1")])
    assert [found(book, time_ms=time) for time in (999, 1_000, 1_999, 2_000, TIME_MS)] == [
        None,
        "old",
        "old",
        "new",
        "new",
    ]


def test_a_version_that_ended_leaves_the_event_to_the_next_selector() -> None:
    """A discount of one class for a second."""
    book = PriceBook([rule("usual", model="m1"), rule("sale", 1_000, 2_000, model="m1", priority_class="interactive")])
    assert [found(book, time_ms=time) for time in (999, 1_000, 1_999, 2_000)] == ["usual", "sale", "sale", "usual"]


def with_price(catalogue: Catalogue, *prices: Price, generation: int = 2) -> Catalogue:
    """The catalogue with model m1 at other prices."""
    model = replace(catalogue.models[ModelName("m1")], price=prices[0], prices=prices[1:])
    return Catalogue(generation=generation, models={model.name: model})


async def test_a_change_of_the_catalogue_holds_from_when_it_is_seen() -> None:
    """Events from before keep the old price however late they come; the id names one content for ever."""
    catalogue, clock = SetCatalogue(priced_catalogue()), ManualClock()
    keeper = PriceKeeper(catalogue, FakePrices(), clock)
    first = await keeper.book()
    assert [(kept.from_ms, kept.price.id) for kept in first.rules] == [(0, "p1")]
    clock.advance(5_000)
    catalogue.current = with_price(priced_catalogue(), replace(PRICE, output="30"))
    changed_ms = clock.now_ms()
    second = await keeper.book()
    assert [(kept.from_ms, kept.price.id) for kept in second.rules] == [(0, "p1"), (changed_ms, "p1@2")]
    assert found(second, time_ms=changed_ms - 1) == "p1"
    assert found(second, time_ms=changed_ms) == "p1@2"
    clock.advance(5_000)
    catalogue.current = replace(catalogue.current, generation=3)
    assert len((await keeper.book()).rules) == 2, "the same content again is no new version"


async def test_two_processes_that_see_a_change_write_it_once() -> None:
    """The second finds the version there."""
    store = FakePrices()
    for _ in range(2):
        await PriceKeeper(SetCatalogue(priced_catalogue()), store, ManualClock()).book()
    assert len(await store.rules()) == 1


def test_declared_times_classes_and_adapters_become_selectors() -> None:
    """A dated price takes effect at its own time, whenever it is seen; applied twice it is there once."""
    dated = Price(id="p9", input="1", priority_class="batch", effective_from_ms=7_000)
    catalogue = with_price(priced_catalogue(), PRICE, dated)
    adapter = Adapter(
        name=AdapterName("a1"), base=ModelName("m1"), source_path="/a1", digest=Digest("sha256:2"), price=Price(id="p2")
    )
    catalogue = msgspec.structs.replace(catalogue, adapters={adapter.name: adapter})
    rules = declared_rules(catalogue, 9_000, PriceBook())
    assert {(kept.selector, kept.from_ms, kept.price.id) for kept in rules} == {
        (Selector("m1"), 0, "p1"),
        (Selector("m1", ANY, "batch"), 7_000, "p9"),
        (Selector(ANY, "a1"), 0, "p2"),
    }
    assert declared_rules(catalogue, 10_000, PriceBook(rules)) == []

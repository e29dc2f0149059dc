"""Which price applies to an event: a book of rules with selectors and effective times. Pure; rating itself is `rating`.

The rule for an event is found in two steps, both by the event's own time, never by its arrival:

1. Among rules that match, the most specific selector wins: adapter before model before neither; within each, one that
   names the class before one that does not.
2. Within one selector the version that took effect last, and not later than the event, wins. If that version has ended,
   the next less specific selector is asked.

Rules are never changed. A new price is a new version from a later instant; a price id names one content for ever, so a
changed price of the catalogue gets an id of its own (`chat@2`). Decision: docs/decisions/0075-prices.md.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from roundhouse.catalogue.records import Catalogue, Price
from services.metering.domain.usage import UsageFacts

ANY: Final = ""
RANKED_MAX: Final = 65_536  # models × adapters × classes that are remembered; a guess, about 10 MB
CATALOGUE: Final = "catalogue"
APPLIED: Final = "applied"


class Selector(NamedTuple):
    """What a rule is for; an empty part matches everything."""

    model: str = ANY
    adapter: str = ANY
    priority_class: str = ANY


class PriceRule(Struct, frozen=True, kw_only=True):
    """One version of one price: from `from_ms` on, before `to_ms` (None = until the next version)."""

    selector: Selector
    price: Price
    from_ms: int
    to_ms: int | None = None
    origin: str = APPLIED


Versions = tuple[list[int], list[PriceRule]]
"""Of one selector, by when they take effect: the instants, and the rules."""


class PriceBook:
    """Every rule, ready to be asked. Immutable but for what it remembers; O(log versions) a question."""

    def __init__(self, rules: Iterable[PriceRule] = ()) -> None:
        self.rules: tuple[PriceRule, ...] = tuple(
            sorted(rules, key=lambda rule: (rule.selector, rule.from_ms, rule.price.id))
        )
        self._ranked: dict[tuple[str, str, str], list[Versions]] = {}
        self._versions: dict[tuple[str, str, str], Versions] = {}
        for rule in self.rules:
            starts, versions = self._versions.setdefault(rule.selector, ([], []))
            starts.append(rule.from_ms)
            versions.append(rule)

    def rule_for(self, facts: UsageFacts) -> PriceRule | None:
        """The rule that applies to an event; None if none does."""
        key = (facts.model, facts.adapter, facts.priority_class._value_)
        ranked = self._ranked.get(key)
        if ranked is None:
            ranked = self._rank(*key)
        for starts, versions in ranked:
            place = bisect_right(starts, facts.time_ms) - 1
            if place < 0:
                continue
            rule = versions[place]
            if rule.to_ms is None or facts.time_ms < rule.to_ms:
                return rule
        return None

    def _rank(self, model: str, adapter: str, wanted: str) -> list[Versions]:
        """Versions of every selector that matches, the most specific first."""
        places = [(model, adapter), (ANY, adapter), (model, ANY), (ANY, ANY)] if adapter else [(model, ANY), (ANY, ANY)]
        keys = [(*place, named) for place in places for named in (wanted, ANY)]
        ranked = [self._versions[key] for key in keys if key in self._versions]
        if len(self._ranked) >= RANKED_MAX:
            self._ranked.clear()  # names come from callers of the wire: what is remembered of them is bounded
        self._ranked[model, adapter, wanted] = ranked
        return ranked

    def newest(self, selector: Selector) -> PriceRule | None:
        """The version that takes effect last, whether or not it has yet."""
        found = self._versions.get(selector)
        return None if found is None else found[1][-1]


def declared_rules(catalogue: Catalogue, now_ms: int, book: PriceBook) -> list[PriceRule]:
    """What the catalogue declares and the book does not have yet.

    A price without an effective time holds from the beginning if it is the first of its selector, else from now on: so
    an event from before the change keeps its old price, however late it comes."""
    news: list[PriceRule] = []
    for selector, price in _declared(catalogue):
        from_ms = price.effective_from_ms
        if from_ms is None:
            known = [rule for rule in book.rules if rule.selector == selector and rule.origin == CATALOGUE]
            timeless = [rule for rule in known if rule.price.effective_from_ms is None]
            if timeless and _is_version_of(timeless[-1].price, price):
                continue
            from_ms = now_ms if known else 0
        elif any(rule.selector == selector and rule.from_ms == from_ms for rule in book.rules):
            continue
        news.append(PriceRule(selector=selector, price=price, from_ms=from_ms, origin=CATALOGUE))
    named: list[PriceRule] = []
    for rule in news:
        named.append(replace(rule, price=with_own_id(rule.price, [*book.rules, *named])))
    return named


def _is_version_of(kept: Price, declared: Price) -> bool:
    return kept.id.partition("@")[0] == declared.id.partition("@")[0] and same_content(kept, declared)


def _declared(catalogue: Catalogue) -> Iterable[tuple[Selector, Price]]:
    for model in catalogue.models.values():
        for price in ([model.price] if model.price else []) + list(model.prices):
            yield Selector(model=model.name, priority_class=price.priority_class), price
    for adapter in catalogue.adapters.values():
        for price in ([adapter.price] if adapter.price else []) + list(adapter.prices):
            yield Selector(adapter=adapter.name, priority_class=price.priority_class), price


def same_content(one: Price, other: Price) -> bool:
    """Whether two prices charge the same, whatever their ids and however their amounts are written."""
    return one.currency == other.currency and all(
        Decimal(getattr(one, name)) == Decimal(getattr(other, name)) for name in ("input", "cached_input", "output")
    )


def with_own_id(price: Price, rules: Sequence[PriceRule]) -> Price:
    """The price under an id that no other content has."""
    taken = {rule.price.id: rule.price for rule in rules}
    name, version = price.id, 1
    while name in taken and not same_content(taken[name], price):
        version += 1
        name = f"{price.id}@{version}"
    return replace(price, id=name) if name != price.id else price

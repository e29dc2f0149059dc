"""The books of the real SQL ledger: late, out of order, repeated, replayed, closed, rated again, folded, in any order.

Checked at the end of every history, on both databases: (1) the totals by an event's own time are those of the rule;
(2) what all periods come to is what all usage comes to, to the last digit; (3) a closed period is what was signed;
(4) folding changes no answer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundhouse.catalogue.records import Price
from roundhouse.errors import Conflict
from services.metering.adapters.sql_accounts import SqlAccounts
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_rerating import SqlRerating
from services.metering.domain.ledger import Candidate, RawEvent
from services.metering.domain.periods import DAY_MS, month_start_ms, next_month_ms
from services.metering.domain.prices import PriceBook, PriceRule, Selector
from services.metering.domain.queries import Dimension, GroupPage, UsageFilter
from services.metering.domain.rating import rate, sum_of
from services.metering.domain.statements import differences
from services.metering.domain.usage import TIME_MS_END, UsageFacts
from services.metering.money_ports import RatingPage
from tests.builders.ledgers import EmptyLedgers, database_url
from tests.builders.usage import TIME_MS, abandoned, usage_facts

FIRST_MS = month_start_ms(TIME_MS)
MONTHS = [FIRST_MS, next_month_ms(FIRST_MS), next_month_ms(next_month_ms(FIRST_MS))]
NOW_MS = TIME_MS_END - 1  # every month is over
BY = (Dimension.TENANT, Dimension.MODEL, Dimension.HOUR)
PRICES = st.decimals(0, 10**6, places=12).map(str)


@dataclass(frozen=True)
class History:
    """What happened: events as they came in batches, and between them closings, ratings and folds."""

    events: list[UsageFacts]
    steps: list[tuple[str, object]]
    books: list[PriceBook]


@st.composite
def books(draw: st.DrawFn) -> PriceBook:
    """A price from the beginning, one of a class, and one from a later month on, in two currencies."""
    named = [Price(id=f"p{n}", input=draw(PRICES), cached_input=draw(PRICES), output=draw(PRICES)) for n in range(3)]
    euros = Price(id="p3", currency="EUR", input=draw(PRICES))
    return PriceBook(
        [
            PriceRule(selector=Selector("m1"), price=named[0], from_ms=0),
            PriceRule(selector=Selector("m1", "", "interactive"), price=named[1], from_ms=MONTHS[1]),
            PriceRule(selector=Selector("m1"), price=named[2], from_ms=MONTHS[2]),
            PriceRule(selector=Selector("", "a1"), price=euros, from_ms=MONTHS[1] + DAY_MS),
        ]
    )


@st.composite
def attempts(draw: st.DrawFn) -> list[UsageFacts]:
    """What one attempt puts on the bus. Two emitters may place it on two sides of the end of a month."""
    number = draw(st.integers(0, 20))
    month = MONTHS[number % 3]
    at = month + (number * 7_777_777) % (27 * DAY_MS)
    adapter = "a1" if number % 2 else ""
    streamed = usage_facts(
        f"r{number}", tenant_id=f"t{number % 2}", time_ms=at, output_tokens=number * 17, adapter=adapter
    )
    silent = abandoned(
        f"r{number}", tenant_id=f"t{number % 2}", time_ms=month - 1, output_tokens=number, adapter=adapter
    )
    return draw(st.sampled_from([[streamed], [silent], [streamed, silent], [silent, streamed]]))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Every event at least once, in any order, some again; perhaps the whole stream again; steps between."""
    events = [event for attempt in draw(st.lists(attempts(), min_size=1, max_size=8)) for event in attempt]
    shuffled = draw(st.permutations(events + draw(st.lists(st.sampled_from(events), max_size=6))))
    size = draw(st.integers(1, 6))
    batches: list[tuple[str, object]] = [("append", shuffled[at : at + size]) for at in range(0, len(shuffled), size)]
    known = draw(st.lists(books(), min_size=1, max_size=2))
    others = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("close"), st.sampled_from(MONTHS)),
                st.tuples(st.just("rerate"), st.sampled_from(range(len(known)))),
                st.tuples(st.just("fold"), st.just(None)),
            ),
            max_size=6,
        )
    )
    steps = list(batches)
    for step in others:
        steps.insert(draw(st.integers(0, len(steps))), step)
    if draw(st.booleans()):
        steps += batches
    return History(events, steps, known)


def expected(events: Sequence[UsageFacts]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """(tenant, model, hour) → (attempts, output tokens): the gateway's event if there is one."""
    chosen: dict[tuple[str, str], UsageFacts] = {}
    for event in sorted(events, key=lambda event: event.emitter == "gateway"):
        chosen[event.tenant_id, event.event_id] = event
    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for event in chosen.values():
        key = (event.tenant_id, event.model, event.time_ms - event.time_ms % 3_600_000)
        count, tokens = sums.get(key, (0, 0))
        sums[key] = (count + 1, tokens + event.output_tokens)
    return sums


def by_hour(page: GroupPage) -> dict[tuple[str, str, int], tuple[int, int]]:
    """The same shape from the ledger, over currencies."""
    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for group in page.groups:
        key = (str(group.key[0]), str(group.key[1]), int(group.key[2]))
        count, tokens = sums.get(key, (0, 0))
        sums[key] = (count + group.totals.attempts, tokens + group.totals.output_tokens)
    return sums


def by_currency(amounts: Sequence[tuple[str, Decimal]]) -> dict[str, Decimal]:
    """Sums that are not 0."""
    totals = {currency: sum_of(amount for other, amount in amounts if other == currency) for currency, _ in amounts}
    return {currency: amount for currency, amount in totals.items() if amount}


class Books:
    """A ledger with its accounts, and one step after the other."""

    def __init__(self, ledger: SqlLedger, history: History) -> None:
        self.ledger = ledger
        self.accounts = SqlAccounts(ledger.database, cluster="test", sign=lambda _: ("s", "k"))
        self._history = history
        self._book = history.books[0]

    async def take(self, kind: str, what: object) -> None:
        """One step of the history."""
        if kind == "append":
            assert isinstance(what, list | tuple)
            await self.ledger.append([self._rated(event) for event in what], now_ms=NOW_MS)
        elif kind == "close":
            try:
                await self.accounts.close(int(str(what)), now_ms=NOW_MS)
            except Conflict:
                return  # not in order: nothing happened
        elif kind == "rerate":
            self._book = self._history.books[int(str(what))]
            page = RatingPage(0, TIME_MS_END, limit=10_000)
            await SqlRerating(self.ledger.database).rerate(page, self._book, now_ms=NOW_MS)
            again = await SqlRerating(self.ledger.database).rerate(page, self._book, now_ms=NOW_MS)
            assert again.changes == (), "rating twice at the same prices corrects nothing"
        else:
            await self.ledger.fold(least=1)

    def _rated(self, facts: UsageFacts) -> Candidate:
        rule = self._book.rule_for(facts)
        return Candidate(facts, rate(facts, None if rule is None else rule.price), RawEvent("s", b""))


async def check(url: str, history: History) -> None:
    """Live through the history, then compare."""
    ledger = await SqlLedger.open(url)
    try:
        books = Books(ledger, history)
        for kind, what in history.steps:
            await books.take(kind, what)
        page = await ledger.groups(UsageFilter(), BY, after=None, limit=1_000)
        assert by_hour(page) == expected(history.events)
        rows = (await ledger.rows(UsageFilter(), after=None, limit=1_000)).rows
        usage = by_currency([(row.rating.currency, row.rating.amount) for row in rows])
        assert usage == by_currency([(group.totals.currency, group.totals.amount) for group in page.groups])
        booked = [sums for month in months() for _, sums in await books.accounts.sums(month)]
        assert by_currency([(sums.currency, sums.amount) for sums in booked]) == usage
        assert sum(sums.output_tokens for sums in booked) == sum(row.facts.output_tokens for row in rows)
        for closed in await books.accounts.closed():
            assert differences(closed, await books.accounts.sums(closed.period_ms)) == []
        while await ledger.fold(least=1):
            pass
        assert await ledger.groups(UsageFilter(), BY, after=None, limit=1_000) == page
    finally:
        await ledger.close()


def months() -> list[int]:
    """Every month in which anything can be booked."""
    return [month_start_ms(FIRST_MS - 1), *MONTHS, next_month_ms(MONTHS[-1])]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def ledgers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmptyLedgers:
    """Empty ledgers of each kind."""
    folder: Path = tmp_path_factory.mktemp("books")
    made = EmptyLedgers(database_url(str(request.param), request, folder), folder)
    asyncio.run(made.migrate())
    return made


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_the_books_are_right_whatever_happened_when(ledgers: EmptyLedgers, history: History) -> None:
    """Points 1 to 4 above (invariant 14)."""
    asyncio.run(check(ledgers.fresh(), history))

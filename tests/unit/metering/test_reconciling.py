"""Every kind of difference between the five books, one at a time, is reported with its request and nothing else is."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.metering.domain.reconciling import (
    Billed,
    Difference,
    Emitted,
    Ending,
    Evidence,
    Kind,
    Recorded,
    RequestKey,
    Settlement,
    compare,
)

FROM_MS, TO_MS = 1_000_000, 2_000_000
Books = dict[str, list[Any]]


def books(requests: int = 3) -> Books:
    """Requests r0, r1, … of t1 on which all books agree: 10 input and 5 output tokens, 0.02 of money."""
    found: Books = {"settlements": [], "emitted": [], "recorded": [], "billed": []}
    for number in range(requests):
        key, event_id, time_ms = RequestKey("t1", f"r{number}"), f"r{number}/1", FROM_MS + number
        found["settlements"].append(Settlement(key, Ending.SETTLED, 15, time_ms))
        found["emitted"].append(Emitted(key, event_id, "gateway", 10, 5, time_ms))
        found["recorded"].append(Recorded(key, event_id, number + 1, 10, 5, "0.02", time_ms))
        found["billed"].append(Billed(key, event_id, number + 1, 10, 5, "0.02", time_ms))
    return found


def evidence(of: Books, *, published: int = 100, erased: Iterable[str] = ()) -> Evidence:
    """The books as evidence."""
    return Evidence(of["settlements"], of["emitted"], of["recorded"], of["billed"], published, frozenset(erased))


def differences(of: Books, *, published: int = 100) -> list[Difference]:
    """What the comparison of the window says."""
    return list(compare(evidence(of, published=published), FROM_MS, TO_MS).differences)


def without(*names: str) -> Callable[[Books], None]:
    """Take the entries of r1 out of some books."""

    def change(of: Books) -> None:
        for name in names:
            of[name] = [each for each in of[name] if each.key.request_id != "r1"]

    return change


def changed(name: str, **fields: Any) -> Callable[[Books], None]:
    """Change the entry of r1 in one book."""

    def change(of: Books) -> None:
        of[name] = [replace(each, **fields) if each.key.request_id == "r1" else each for each in of[name]]

    return change


@pytest.mark.parametrize(
    ("inject", "kinds"),
    [
        (without("settlements"), [Kind.NO_SETTLEMENT]),
        (changed("settlements", ending=Ending.WITHDRAWN, tokens=0), [Kind.WITHDRAWN_BUT_BILLED]),
        (changed("settlements", tokens=16), [Kind.SETTLED_DIFFERS]),
        (without("emitted", "recorded", "billed"), [Kind.NO_EVENT]),
        (without("recorded", "billed"), [Kind.NO_ROW]),
        (without("emitted"), [Kind.NO_EVENT, Kind.ROW_WITHOUT_EVENT]),
        (changed("recorded", output_tokens=6), [Kind.ROW_DIFFERS, Kind.RECORD_DIFFERS]),
        (without("billed"), [Kind.NO_RECORD]),
        (without("recorded"), [Kind.NO_ROW, Kind.RECORD_WITHOUT_ROW]),
        (changed("billed", amount="0.03"), [Kind.RECORD_DIFFERS]),
        (changed("billed", sequence=77), [Kind.NO_RECORD]),
    ],
)
def test_each_kind_of_difference_is_reported_with_its_request(
    inject: Callable[[Books], None], kinds: list[Kind]
) -> None:
    """One fault in one book: the request is named, once for each pair of books that it sets apart; no other is."""
    injected = books()
    inject(injected)
    found = differences(injected)
    assert [each.kind for each in found] == kinds
    assert {(each.request_id, each.tenant_id) for each in found} == {("r1", "t1")}


def test_books_that_agree_differ_in_nothing() -> None:
    """Counts of what was compared are told, too."""
    comparison = compare(evidence(books()), FROM_MS, TO_MS)
    assert list(comparison.differences) == []
    assert comparison.checked == {"requests": 3, "settled": 3, "events": 3, "rows": 3, "records": 3}


def test_an_erased_tenant_is_counted_and_not_compared() -> None:
    """Its row bears a pseudonym; its event, record and settlement were removed; one more event was on its way."""
    found = books()
    gone = RequestKey("~1f", "r1")
    for name in ("settlements", "emitted", "billed"):
        without(name)(found)
    changed("recorded", key=gone)(found)
    found["emitted"].append(Emitted(RequestKey("old-name", "late"), "late/1", "gateway", 10, 5, FROM_MS))
    assert len(differences(found)) == 5, "as long as nobody says that they were erased"
    comparison = compare(evidence(found, erased=["~1f", "old-name"]), FROM_MS, TO_MS)
    assert list(comparison.differences) == []
    assert comparison.checked["erased"] == 2


def test_what_is_not_due_yet_is_no_difference() -> None:
    """A row beyond the published sequence needs no record; a request that runs or whose gateway died no settlement."""
    young = books()
    without("billed")(young)
    assert differences(young, published=1) == []
    for ending in (Ending.RUNNING, Ending.LAPSED):
        held = books()
        changed("settlements", ending=ending, tokens=0)(held)
        assert differences(held) == []


def test_a_gateways_event_counts_before_a_schedulers_and_its_correction_is_billed() -> None:
    """Killed and come back: the scheduler's 3 tokens are superseded by 5; both records are in the billing stream."""
    cut = books()
    key = RequestKey("t1", "r1")
    cut["emitted"].insert(0, Emitted(key, "r1/1", "scheduler", 10, 3, FROM_MS + 1))
    cut["billed"].insert(0, Billed(key, "r1/1", 1, 10, 3, "0.01", FROM_MS + 1))
    changed("recorded", sequence=9)(cut)
    cut["billed"][2] = replace(cut["billed"][2], sequence=9)
    assert differences(cut) == []


def test_a_request_belongs_to_the_window_of_its_last_entry() -> None:
    """Settled just before the end, its event after it: that is the next window's. Attempts are added up."""
    late = books()
    changed("emitted", time_ms=TO_MS + 1)(late)
    without("settlements")(late)
    assert differences(late) == []
    again = books()
    again["emitted"].append(Emitted(RequestKey("t1", "r1"), "r1/2", "gateway", 0, 7, FROM_MS + 1))
    found = differences(again)
    assert [each.kind for each in found] == [Kind.SETTLED_DIFFERS, Kind.NO_ROW]
    assert found[0].detail == "settled with 15 tokens, emitted 22"


@given(st.sampled_from(["settlements", "emitted", "recorded", "billed"]), st.sets(st.integers(0, 9)))
def test_whatever_is_missing_from_one_book_is_found(book: str, missing: set[int]) -> None:
    """Every missing entry is reported by its request, whichever book lost it, and no request that has all of them."""
    lost = books(10)
    lost[book] = [each for number, each in enumerate(lost[book]) if number not in missing]
    assert {each.request_id for each in differences(lost)} == {f"r{number}" for number in missing}

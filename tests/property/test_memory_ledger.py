"""Invariant 6 by random histories: never more held than there is, and a step that fails changes nothing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.loader.domain.memory_ledger import MemoryLedger, NoRoom
from services.loader.domain.room import Leaving, NotEnough, Offered, choose_leaving

CAPACITY = 100
KEYS = st.integers(0, 5)
SIZES = st.integers(0, 120)


class Histories(RuleBasedStateMachine):
    """Loads that succeed, fail and are measured, in any order; `model` is a plain dictionary that should agree."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: MemoryLedger[int] = MemoryLedger(CAPACITY)
        self.model: dict[int, tuple[int, int]] = {}

    def free(self) -> int:
        """By the dictionary."""
        return CAPACITY - sum(reserved + resident for reserved, resident in self.model.values())

    @rule(key=KEYS, size=SIZES)
    def reserve(self, key: int, size: int) -> None:
        """A load begins, or there is no room and nothing changed."""
        if key in self.model:
            return
        before = self.ledger
        after = before.reserve(key, size)
        if size > self.free():
            assert after == NoRoom(size - self.free())
            assert self.ledger == before
            return
        assert isinstance(after, MemoryLedger)
        self.ledger, self.model[key] = after, (size, 0)

    @rule(key=KEYS, size=SIZES)
    def claim(self, key: int, size: int) -> None:
        """A load takes what is free of what it needs; asking again takes what came free since."""
        reserved, resident = self.model.get(key, (0, 0))
        if resident:
            return
        taken = max(0, min(size - reserved, self.free()))
        self.ledger, self.model[key] = self.ledger.reserve_up_to(key, size), (reserved + taken, 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A load succeeds."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.ledger, self.model[key] = self.ledger.commit(key), (0, sum(self.model[key]))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), size=SIZES)
    def measure(self, data: st.DataObject, size: int) -> None:
        """A resident instance turns out larger or smaller."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        reserved, resident = self.model[key]
        if reserved:
            return
        after = self.ledger.resize(key, size)
        if size - resident > self.free():
            assert isinstance(after, NoRoom)
            return
        assert isinstance(after, MemoryLedger)
        self.ledger, self.model[key] = after, (0, size)

    @rule(key=KEYS)
    def release(self, key: int) -> None:
        """A load fails, or an instance is gone; twice is the same as once."""
        self.ledger = self.ledger.release(key).release(key)
        self.model.pop(key, None)

    @rule(key=KEYS, size=SIZES)
    def fail(self, key: int, size: int) -> None:
        """A load that fails leaves the ledger exactly as it was."""
        if key in self.model:
            return
        begun = self.ledger.reserve(key, size)
        if isinstance(begun, MemoryLedger):
            assert begun.release(key) == self.ledger
            assert begun.commit(key).release(key) == self.ledger

    @invariant()
    def never_more_than_there_is(self) -> None:
        """Invariant 6, and the dictionary agrees."""
        assert self.ledger.resident + self.ledger.reserved <= CAPACITY
        assert self.ledger.free == self.free()
        held = {key: (entry.reserved, entry.resident) for key, entry in self.ledger.holdings.items()}
        assert held == self.model


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(-20, 200), st.lists(st.integers(1, 60), max_size=8))
def test_the_chosen_are_enough_and_none_of_them_could_stay(needed: int, sizes: list[int]) -> None:
    """Whoever leaves is needed: without any one of them it would not be enough (case B22)."""
    choice = choose_leaving({0: needed}, [Offered(index, {0: size}) for index, size in enumerate(sizes)])
    match choice:
        case NotEnough(missing):
            assert sum(sizes) + missing == needed
        case Leaving(keys):
            given_bytes = sum(sizes[key] for key in keys)
            assert given_bytes >= needed
            assert list(keys) == sorted(keys)
            assert all(given_bytes - sizes[key] < needed for key in keys)


def test_a_ledger_over_its_capacity_cannot_be_made() -> None:
    """The assertion is alive: a broken ledger is refused when it is made."""
    empty: MemoryLedger[str] = MemoryLedger(10)
    with pytest.raises(AssertionError):
        replace(empty.reserve_up_to("a", 10), capacity=9)

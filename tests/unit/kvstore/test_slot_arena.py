"""Slots: classes, extents, and that nothing is lost or handed out twice."""

import pytest

from services.kvstore.domain.slot_arena import NoSlot, Slot, SlotArena


def test_slots_of_one_class_share_an_extent_and_never_overlap() -> None:
    """An extent of 8 units holds floor(8/3) = 2 slots of 3 units; the third begins the next extent."""
    arena = SlotArena(2 * 8 * 64, 64, extent_bytes=8 * 64)
    assert [arena.take(3) for _ in range(3)] == [Slot(0, 3), Slot(3 * 64, 3), Slot(8 * 64, 3)]
    assert (arena.units_held, arena.units_free, arena.units_total) == (9, 7, 16)


def test_a_class_is_full_when_no_extent_is_free() -> None:
    """One extent taken by slots of 1 unit leaves nothing for a class of 2, though 3 of its units are free."""
    arena = SlotArena(4 * 64, 64, extent_bytes=4 * 64)
    arena.take(1)
    assert arena.take(2) == NoSlot()
    assert arena.units_free == 3


def test_an_emptied_extent_serves_another_class() -> None:
    """The last slot given back frees its extent: 4 slots of 1 unit go, 2 of 2 units come."""
    arena = SlotArena(4 * 64, 64, extent_bytes=4 * 64)
    for slot in [arena.take(1) for _ in range(4)]:
        assert isinstance(slot, Slot)
        arena.give_back(slot)
    assert [arena.take(2), arena.take(2), arena.take(2)] == [Slot(0, 2), Slot(2 * 64, 2), NoSlot()]


@pytest.mark.parametrize(
    ("length", "units"), [(1, 1), (64, 1), (65, 2), (8 * 64, 8), (17 * 64, 18), (36 * 64, 36), (33 * 64, 36)]
)
def test_classes_waste_at_most_an_eighth(length: int, units: int) -> None:
    """Up to 16 units every size has its class; from 16 to 32 they are 2 apart, from 32 to 64 they are 4 apart."""
    assert SlotArena(64 * 64, 64, extent_bytes=64 * 64).class_of(length) == units


def test_a_block_larger_than_an_extent_has_no_class() -> None:
    """65 units do not fit an extent of 64."""
    assert SlotArena(64 * 64, 64, extent_bytes=64 * 64).class_of(65 * 64) == NoSlot()


def test_extents_are_chosen_from_the_size_of_the_arena() -> None:
    """256 MiB in 64 extents of 4 MiB = 1,024 slots of 4 KiB each."""
    arena = SlotArena(256 * 1024 * 1024, 4096)
    assert (len(arena.extents), arena.extent_units, arena.units_total) == (64, 1024, 65_536)


def test_what_does_not_fill_an_extent_is_left_out() -> None:
    """10 units in extents of 4 are 2 extents; 2 units are never handed out."""
    assert SlotArena(10 * 64, 64, extent_bytes=4 * 64).units_total == 8

"""The block table: who finds what, what goes first, and what a dead client leaves behind."""

from services.kvstore.domain.records import (
    Acquired,
    Changes,
    Committed,
    Holder,
    Missed,
    RefusalReason,
    Refused,
    Reserved,
    WrittenBlock,
)
from tests.builders.kv_blocks import HOLDER, OTHER_SALT, SALT, chain, found, new_blocks, store, table_of, written_well


def test_the_longest_stored_run_is_found() -> None:
    """3 of 5 blocks are stored: a prompt of 5 finds 3, and one that differs at its second block finds 1."""
    table, keys = table_of(8), chain("a", 5)
    assert store(table, keys[:3]) == 3
    assert found(table, keys) == 3
    assert found(table, [keys[0], b"other", keys[2]]) == 1
    counts = table.statistics()
    assert (counts.hits, counts.misses) == (3 + 1, 2 + 2)


def test_a_block_is_found_only_with_the_salt_that_stored_it() -> None:
    """Invariant 11: even a caller who has the right keys finds nothing with another salt."""
    table, keys = table_of(8), chain("a", 2)
    store(table, keys)
    assert table.acquire(OTHER_SALT, keys, HOLDER, 0) == Missed()
    assert found(table, keys) == 2


def test_another_salt_can_neither_extend_nor_replace_a_chain() -> None:
    """A writer with the wrong salt gets no slot under the chain, nor one for a key that is there."""
    table, keys = table_of(8), chain("a", 3)
    store(table, keys[:2])
    under = new_blocks(keys[2:], salt=OTHER_SALT, parent=keys[1])
    again = new_blocks(keys[:1], salt=OTHER_SALT)
    assert table.reserve(under, HOLDER, 0) == Refused(RefusalReason.PARENT_UNKNOWN)
    assert table.reserve(again, HOLDER, 0) == Refused(RefusalReason.PARENT_UNKNOWN)


def test_a_run_begins_at_the_first_block_of_the_prompt() -> None:
    """The second block alone is no prefix of anything."""
    table, keys = table_of(8), chain("a", 2)
    store(table, keys)
    assert found(table, keys[1:]) == 0


def test_reserved_blocks_are_invisible_until_committed() -> None:
    """Between reserve and commit a lookup misses, and a second writer gets no slot for the same key."""
    table, keys = table_of(8), chain("a", 1)
    reserved = table.reserve(new_blocks(keys), HOLDER, 0)
    assert isinstance(reserved, Reserved)
    assert found(table, keys) == 0
    assert table.reserve(new_blocks(keys), HOLDER, 0) == Refused(RefusalReason.NOTHING_NEW)
    assert table.commit(reserved.lease_id, written_well(reserved), 0) == Committed(1, 0)
    assert found(table, keys) == 1


def test_a_torn_block_takes_those_below_it_along() -> None:
    """Of 3 blocks the second was torn: 1 is committed, 2 rejected, 1 is corrupt, and 7 of 8 slots are free again."""
    table, keys = table_of(8), chain("a", 3)
    reserved = table.reserve(new_blocks(keys), HOLDER, 0)
    assert isinstance(reserved, Reserved)
    written = written_well(reserved)
    written[1] = WrittenBlock(keys[1], checksum_claimed=1, checksum_found=2)
    assert table.commit(reserved.lease_id, written, 0) == Committed(1, 2)
    counts = table.statistics()
    assert (found(table, keys), counts.corrupt, counts.units_free) == (1, 1, 7)


def test_a_dead_writer_loses_its_slots_when_its_lease_ends() -> None:
    """Two slots are held at 999 ms and free at 1,000 ms; a commit that comes after is rejected."""
    table, keys = table_of(8), chain("a", 2)
    reserved = table.reserve(new_blocks(keys), HOLDER, 0)
    assert isinstance(reserved, Reserved)
    assert (table.expire(999), table.statistics().units_held) == (0, 2)
    assert (table.expire(1_000), table.statistics().units_held) == (1, 0)
    assert table.commit(reserved.lease_id, written_well(reserved), 1_000) == Committed(0, 2)
    assert store(table, keys, now_ms=1_000) == 2


def test_the_least_recently_used_leaf_goes_first() -> None:
    """3 slots: a/0, a/1, b/0. After b was used last, c evicts a/1 (a leaf) before a/0, then a/0, then b."""
    table = table_of(3)
    store(table, chain("a", 2))
    store(table, chain("b", 1))
    assert store(table, chain("c", 1)) == 1
    assert (found(table, chain("a", 2)), found(table, chain("b", 1)), found(table, chain("c", 1))) == (1, 1, 1)
    assert store(table, chain("d", 1)) == 1
    assert (found(table, chain("a", 2)), found(table, chain("b", 1))) == (0, 1)
    assert table.statistics().evictions == 2


def test_a_chain_that_grows_never_evicts_its_own_parents() -> None:
    """4 slots hold a/0..a/3; a/4 finds no room, because everything above it is held for it."""
    table, keys = table_of(4), chain("a", 5)
    assert store(table, keys[:4]) == 4
    assert table.reserve(new_blocks(keys[4:], parent=keys[3]), HOLDER, 0) == Refused(RefusalReason.NO_ROOM)
    assert table.reserve(new_blocks(keys), HOLDER, 0) == Refused(RefusalReason.NO_ROOM)
    assert found(table, keys) == 4


def test_a_leased_block_stays() -> None:
    """While a is read, 2 new blocks find 1 of 2 slots; after the release they find both."""
    table = table_of(2)
    store(table, chain("a", 1))
    lease = table.acquire(SALT, chain("a", 1), HOLDER, 0)
    assert isinstance(lease, Acquired)
    assert store(table, chain("b", 2)) == 1
    table.release(lease.lease_id, 0)
    assert store(table, chain("c", 2)) == 2


def test_a_reader_that_never_comes_back_holds_nothing_for_ever() -> None:
    """Invariant 12: a lease asked for a day is cut to 60 s; then the block can go."""
    table = table_of(1)
    store(table, chain("a", 1))
    table.acquire(SALT, chain("a", 1), Holder("gone", lease_ms=86_400_000), 0)
    assert store(table, chain("b", 1), now_ms=59_999) == 0
    assert store(table, chain("b", 1), now_ms=60_000) == 1
    assert table.statistics().leases_expired == 1


def test_a_block_without_its_parents_is_refused() -> None:
    """Nobody could find it."""
    table, keys = table_of(8), chain("a", 2)
    assert table.reserve(new_blocks(keys[1:], parent=keys[0]), HOLDER, 0) == Refused(RefusalReason.PARENT_UNKNOWN)


def test_blocks_of_another_length_cannot_join_a_chain() -> None:
    """One prompt of one model has blocks of one length."""
    table, keys = table_of(8, extent_units=2), chain("a", 2)
    store(table, keys[:1])
    longer = new_blocks(keys[1:], parent=keys[0], length=128)
    assert table.reserve(longer, HOLDER, 0) == Refused(RefusalReason.LENGTH_DIFFERS)


def test_a_block_larger_than_any_extent_is_refused() -> None:
    """3 units do not fit extents of 2."""
    table = table_of(8, extent_units=2)
    assert table.reserve(new_blocks(chain("a", 1), length=192), HOLDER, 0) == Refused(RefusalReason.TOO_LARGE)


def test_a_child_of_a_block_that_was_never_written_is_rejected() -> None:
    """Writer 2 stands on writer 1's block; writer 1 dies; writer 2's commit finds no parent."""
    table, keys = table_of(8), chain("a", 2)
    table.reserve(new_blocks(keys[:1]), Holder("dies", lease_ms=10), 0)
    second = table.reserve(new_blocks(keys[1:], parent=keys[0]), HOLDER, 0)
    assert isinstance(second, Reserved)
    assert table.commit(second.lease_id, written_well(second), 10) == Committed(0, 1)
    assert table.statistics().units_free == 8


def test_erasing_a_salt_leaves_the_others_alone() -> None:
    """3 blocks of 64 bytes of tenant one go, also one that is being read and one that is being written. They hold their
    slots until they are overwritten: the one being written not before its writer is done."""
    table = table_of(8)
    store(table, chain("a", 2))
    store(table, chain("b", 1), salt=OTHER_SALT)
    lease = table.acquire(SALT, chain("a", 1), HOLDER, 0)
    pending = table.reserve(new_blocks(chain("c", 1)), HOLDER, 0)
    assert isinstance(lease, Acquired)
    assert isinstance(pending, Reserved)
    erased = table.erase_salt(SALT, 0)
    assert (erased.blocks, erased.bytes_dropped) == (3, 3 * 64)
    assert (found(table, chain("a", 2)), found(table, chain("b", 1), salt=OTHER_SALT)) == (0, 1)
    assert (table.usage(SALT), table.statistics().units_held) == ((3, 3 * 64), 4)
    places = table.to_overwrite(8, 0)
    assert {place.key for place in places} == set(chain("a", 2))
    table.overwritten(places)
    assert (table.usage(SALT), table.is_overwritten(SALT)) == ((1, 64), False)
    assert table.commit(pending.lease_id, written_well(pending), 0) == Committed(0, 1)
    table.overwritten(table.to_overwrite(8, 0))
    assert (table.usage(SALT), table.is_overwritten(SALT)) == ((0, 0), True)
    assert table.statistics().units_held == 2  # b, and a/0 until its reader is done
    table.release(lease.lease_id, 0)
    assert table.statistics().units_held == 1


def test_a_block_whose_bytes_changed_is_dropped_with_all_below_it() -> None:
    """The checksum found differs from the one stored: 2 of 3 blocks go, 1 is corrupt; a false alarm changes nothing."""
    table, keys = table_of(8), chain("a", 3)
    store(table, keys)
    lease = table.acquire(SALT, keys, HOLDER, 0)
    assert isinstance(lease, Acquired)
    assert table.recheck(keys[1], lease.blocks[1].checksum) is False
    assert table.recheck(keys[1], 12345) is True
    table.release(lease.lease_id, 0)
    assert (found(table, keys), table.statistics().corrupt, table.statistics().units_free) == (1, 1, 7)


def test_an_extent_changes_its_class_when_all_of_it_is_older() -> None:
    """Extents of 2 units: two small blocks (old), one large (new). Another large one takes the small ones' place."""
    table = table_of(4, extent_units=2)
    store(table, chain("s", 1))
    store(table, chain("t", 1))
    store(table, chain("large", 1), length=128)
    assert store(table, chain("larger", 1), length=128) == 1
    assert (found(table, chain("s", 1)), found(table, chain("t", 1)), found(table, chain("large", 1))) == (0, 0, 1)


def test_an_extent_with_something_newer_stays() -> None:
    """As before, but one of the small blocks was used last: the class gives up its own oldest block instead."""
    table = table_of(4, extent_units=2)
    store(table, chain("s", 1))
    store(table, chain("t", 1))
    store(table, chain("large", 1), length=128)
    found(table, chain("t", 1))
    assert store(table, chain("larger", 1), length=128) == 1
    assert (found(table, chain("s", 1)), found(table, chain("large", 1))) == (1, 0)


def test_changes_are_told_once() -> None:
    """Two blocks came and one of them went; the next question finds nothing new."""
    table = table_of(2)
    store(table, chain("a", 1))
    store(table, chain("b", 2))
    assert table.take_changes() == Changes((b"a/0", b"b/0", b"b/1"), (b"a/0",))
    assert table.take_changes() == Changes((), ())

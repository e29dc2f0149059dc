"""The index of the disk: chains stay whole, salts keep their share, and a segment given up always yields room."""

from services.kvstore.domain.disk_index import DiskIndex, DiskRecord, NothingToReclaim, Reclaim
from tests.builders.kv_blocks import OTHER_SALT, SALT, chain

SPAN, A_SEGMENT = 10, 4


def index() -> DiskIndex:
    """4 segments of 4 blocks."""
    return DiskIndex(4 * A_SEGMENT * SPAN, A_SEGMENT * SPAN)


def add(to: DiskIndex, keys: list[bytes], segment: int, salt: bytes = SALT, parent: bytes = b"") -> None:
    """Enter a chain into one segment."""
    for place, key in enumerate(keys):
        assert to.add(DiskRecord(key, salt, b"model", parent, 8, 1, segment, place * SPAN, SPAN))
        parent = key


def test_a_block_without_its_parent_is_refused() -> None:
    """Nobody could ever read it."""
    empty, keys = index(), chain("a", 2)
    assert not empty.add(DiskRecord(keys[1], SALT, b"model", keys[0], 8, 1, 0, 0, SPAN))


def test_a_scan_may_find_children_first() -> None:
    """Of 3 records in the wrong order and 1 orphan, the orphan is left."""
    found, keys = index(), chain("a", 3)
    parents = [b"", keys[0], keys[1]]
    records = [
        DiskRecord(key, SALT, b"model", parent, 8, 1, 0, 0, SPAN) for key, parent in zip(keys, parents, strict=True)
    ]
    orphan = DiskRecord(b"orphan", SALT, b"model", b"unknown", 8, 1, 0, 0, SPAN)
    assert found.restore([orphan, *reversed(records)]) == [orphan]
    assert len(found.run(SALT, keys)) == 3


def test_the_oldest_segment_goes_and_what_was_used_moves() -> None:
    """Of 2 chains of 2 in segment 0 one was used since: it moves, the other is dropped."""
    full, used, unused = index(), chain("used", 2), chain("unused", 2)
    add(full, used, 0)
    add(full, unused, 0)
    add(full, chain("b", 4), 1)
    add(full, chain("c", 4), 2)
    add(full, chain("d", 4), 3)
    full.use(used)
    plan = full.reclaim([0, 1, 2, 3], writing=3)
    assert isinstance(plan, Reclaim)
    assert (plan.segment, {record.key for record in plan.moved}) == (0, set(used))
    assert {record.key for record in plan.dropped} == set(unused)


def test_a_quiet_salt_keeps_its_share() -> None:
    """Share: 16 x 10 / 2 / 2 salts = 40 bytes. The quiet one's 2 old blocks move; the loud one's are dropped."""
    full = index()
    add(full, chain("quiet", 2), 0, OTHER_SALT)
    add(full, chain("loud", 2), 0)
    for segment in (1, 2, 3):
        add(full, chain(f"loud{segment}", 4), segment)
    plan = full.reclaim([0, 1, 2, 3], writing=3)
    assert isinstance(plan, Reclaim)
    assert {record.salt for record in plan.moved} == {OTHER_SALT}
    assert {record.salt for record in plan.dropped} == {SALT}


def test_at_most_half_a_segment_moves() -> None:
    """All 4 blocks were used: 2 move, from the start of the chain, and 2 go."""
    full, keys = index(), chain("a", 4)
    add(full, keys, 0)
    add(full, chain("b", 4), 1)
    full.use(keys)
    plan = full.reclaim([0, 1], writing=1)
    assert isinstance(plan, Reclaim)
    assert [record.key for record in plan.moved] == keys[:2]


def test_the_segment_being_written_is_never_given_up() -> None:
    """There is nothing else."""
    only = index()
    add(only, chain("a", 4), 0)
    assert only.reclaim([0], writing=0) == NothingToReclaim()

"""Who stays when the arena is full: the used before the scanned, and every tenant its share."""

import pytest

from services.kvstore.domain.eviction import ReuseOrder, rank
from services.kvstore.domain.records import Block
from services.kvstore.domain.slot_arena import Slot
from tests.builders.kv_blocks import OTHER_SALT, SALT, chain, found, store, table_of


def block(name: str, *, salt: bytes = SALT, uses: int = 0, depth: int = 0) -> Block:
    """A stored block of one unit."""
    made = Block(name.encode(), salt, b"model", b"", Slot(0, 1), 64, depth, stored=True)
    made.uses = uses
    return made


def order_with_lifetime(lifetime_ms: int, guarded: bytes = b"") -> ReuseOrder:
    """An order that has seen 2,000 blocks go after `lifetime_ms` without use."""
    order = ReuseOrder(lambda salt: salt == guarded)
    for _ in range(2_000):
        order.evicted(block("gone"), lifetime_ms)
    return order


def test_a_used_block_outlives_a_newer_scan() -> None:
    """Lifetime 1,000 ms: used twice at 0 it is worth 0 + 2 x 500 = 1,000, more than a block scanned at 900."""
    order = order_with_lifetime(1_000)
    used, scanned = block("used", uses=2), block("scanned")
    order.add(used, 0)
    order.add(scanned, 900)
    assert order.least(1) is scanned
    order.discard(scanned)
    later = block("later")
    order.add(later, 1_100)
    assert order.least(1) is used


def test_beginnings_outlive_ends() -> None:
    """At the same time, a block 15 deep loses 0.1 x 4 lifetimes against a first one."""
    order = order_with_lifetime(1_000)
    first, deep = block("first"), block("deep", depth=15)
    order.add(first, 0)
    order.add(deep, 300)
    assert order.least(1) is deep
    assert rank(deep)[0] == pytest.approx(300 - 400)


def test_guarded_salts_go_last() -> None:
    """An old block of a salt within its share stays while a newer one of a loud salt is there."""
    order = order_with_lifetime(0, guarded=OTHER_SALT)
    quiet, loud = block("quiet", salt=OTHER_SALT), block("loud")
    order.add(quiet, 0)
    order.add(loud, 50)
    assert order.least(1) is loud
    assert order.least_of_all() is loud
    assert order.greatest_rank([quiet, loud]) is None
    order.discard(loud)
    assert order.least(1) is quiet


def test_a_loud_tenant_cannot_flush_a_quiet_one() -> None:
    """16 slots, 2 tenants: a share is 16 / 2 / 2 = 4. The quiet one's 4 blocks outlive 100 newer ones of the other."""
    table = table_of(16)
    store(table, chain("quiet", 4), salt=OTHER_SALT)
    for number in range(100):
        store(table, chain(f"loud{number}", 1), number + 1)
    assert found(table, chain("quiet", 4), 200, salt=OTHER_SALT) == 4


def test_stale_entries_do_not_pile_up() -> None:
    """A block used 10,000 times has one entry; 1,000 that were dropped leave no more than 2 an alive one and 64."""
    order, used = order_with_lifetime(0), block("used")
    for now_ms in range(10_000):
        order.add(used, now_ms)
        order.discard(used)
    order.add(used, 10_000)
    assert order.least(1) is used
    (heap,) = order._heaps[1].values()
    assert len(heap._entries) == 1
    for number in range(1_000):
        gone = block(f"gone{number}")
        order.add(gone, 10_001)
        gone.condemned = True
        order.dropped(gone)
    assert len(heap._entries) <= 2 * 1 + 64 + 1
    assert order.least(1) is used

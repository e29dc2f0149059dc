"""Who stays when the arena is full: what is expected back, the used before the scanned, and every tenant its share."""

import random

from services.kvstore.domain.eviction import FRESH_MS, ReuseOrder
from services.kvstore.domain.records import Acquired, Block
from services.kvstore.domain.reuse_forecast import ReuseForecast, bin_of, kind_of
from services.kvstore.domain.slot_arena import Slot
from tests.builders.kv_blocks import HOLDER, OTHER_SALT, SALT, chain, found, store, table_of


def block(name: str, used_ms: int, *, salt: bytes = SALT, kind: int = 0, depth: int = 0) -> Block:
    """A stored block of one unit."""
    made = Block(name.encode(), salt, b"model", b"", Slot(0, 1), 64, depth, stored=True)
    made.used_ms, made.kind = used_ms, kind
    return made


def thinking(think_ms: int, share: float = 1.0) -> ReuseForecast:
    """A forecast that has seen 1,000 uses of kind 0 of which a share came back after exactly that time."""
    forecast = ReuseForecast()
    for number in range(1_000):
        forecast.began(0)
        if number < 1_000 * share:
            forecast.came_back(0, bin_of(think_ms))
    forecast.learn()
    return forecast


def order_of(forecast: ReuseForecast | None = None, guarded: bytes = b"") -> ReuseOrder:
    """An empty order."""
    return ReuseOrder(lambda salt: salt == guarded, forecast or ReuseForecast())


def test_without_experience_the_longest_unused_goes() -> None:
    """Of blocks used at 0, 10 and 20 s the first goes."""
    order = order_of()
    blocks = [block(str(second), 1_000 * second) for second in (10, 0, 20)]
    for each in blocks:
        order.add(each, 60_000)
    assert order.least(1, 60_000) is blocks[1]


def test_a_session_that_thinks_keeps_its_blocks_while_newer_ones_go() -> None:
    """Turns come after 60 s. At 60 s one block has waited for 55 s, one for 2 s: the young one goes, its turn is
    further away. At 130 s both have missed their turn, the older one for longer."""
    order = order_of(thinking(60_000))
    waiting, young = block("waiting", 5_000), block("young", 58_000)
    order.add(waiting, 60_000)
    order.add(young, 60_000)
    assert order.least(1, 60_000) is young
    assert order.rank(waiting, 60_000)[0] > order.rank(young, 60_000)[0] > 0
    assert order.least(1, 130_000) is waiting


def test_what_comes_back_more_often_stays() -> None:
    """Two kinds of the same age; of one all come back, of the other a tenth."""
    forecast, often = thinking(60_000, share=0.1), kind_of(4, 0)
    for _ in range(1_000):
        forecast.began(often)
        forecast.came_back(often, bin_of(60_000))
    forecast.learn()
    order = order_of(forecast)
    rare, used = block("rare", 0), block("used", 0, kind=often)
    order.add(used, 10_000)
    order.add(rare, 10_000)
    assert order.least(1, 10_000) is rare


def test_the_end_of_a_chain_goes_before_what_is_above_it() -> None:
    """Of two ends used at the same time, the deeper one."""
    order = order_of()
    deep, first = block("deep", 0, depth=15), block("first", 0)
    order.add(first, 10_000)
    order.add(deep, 10_000)
    assert order.least(1, 10_000) is deep


def test_what_is_being_written_goes_last() -> None:
    """A block of this moment stays as long as there is an old one, though old ones are expected back."""
    order = order_of(thinking(60_000))
    now_ms = 50_000
    fresh, waiting = block("fresh", now_ms), block("waiting", 0)
    order.add(fresh, now_ms)
    order.add(waiting, now_ms)
    assert order.least(1, now_ms) is waiting
    assert order.least(1, now_ms + FRESH_MS) is fresh
    order.discard(waiting)
    assert order.least(1, now_ms) is fresh


def test_guarded_salts_go_last() -> None:
    """An old block of a salt within its share stays while a newer one of a loud salt is there, fresh or not."""
    order = order_of(guarded=OTHER_SALT)
    quiet, loud = block("quiet", 0, salt=OTHER_SALT), block("loud", 59_000)
    order.add(quiet, 60_000)
    order.add(loud, 60_000)
    assert order.least(1, 60_000) is loud
    assert order.least_of_all(60_000) is loud
    assert order.greatest_rank([quiet, loud], 60_000) is None
    order.discard(loud)
    fresh = block("fresh", 60_000)
    order.add(fresh, 60_000)
    assert order.least(1, 60_000) is fresh
    order.discard(fresh)
    assert order.least(1, 60_000) is quiet


def test_a_loud_tenant_cannot_flush_a_quiet_one() -> None:
    """16 slots, 2 tenants: a share is 16 / 2 / 2 = 4. The quiet one's 4 blocks outlive 100 newer ones of the other."""
    table = table_of(16)
    store(table, chain("quiet", 4), salt=OTHER_SALT)
    for number in range(100):
        store(table, chain(f"loud{number}", 1), 10_000 * (number + 1))
    assert found(table, chain("quiet", 4), 2_000_000, salt=OTHER_SALT) == 4


def test_a_scan_does_not_flush_sessions_that_come_back() -> None:
    """8 sessions of 2 blocks come every 60 s, and 1 a second that never comes again: between two turns 60 of these and
    14 blocks of other sessions want the 32 slots, and by last use none would be found. 3 of 4 and more are, once this
    has been seen for some minutes."""
    table, chance, scans = table_of(32), random.Random(1), 0
    hits = asked = 0
    for second in range(1_200):
        now_ms = 1_000 * second
        if second % 60 < 8:
            keys = chain(f"session{second % 60}", 2)
            have = found(table, keys, now_ms)
            if second >= 600:
                hits, asked = hits + have, asked + 2
            if have < 2:
                store(table, keys, now_ms)
        for _ in range(chance.randint(0, 2)):
            scans += 1
            keys = chain(f"scan{scans}", 1)
            assert found(table, keys, now_ms) == 0
            store(table, keys, now_ms)
    assert scans > 1_000
    assert asked == 160
    assert hits >= 0.75 * asked


def test_of_what_nobody_has_found_yet_prompts_as_long_as_those_that_come_back_stay() -> None:
    """Every 10 s comes a prompt of 2 blocks that is asked for again once, after 60 s, and one of 20 that never is: 132
    blocks want 40 slots, and neither use nor think time tells which. Their length does, once it has been seen."""
    table = table_of(40)
    hits = 0
    for number in range(120):
        now_ms = 10_000 * number
        if number >= 6:
            have = found(table, chain(f"short{number - 6}", 2), now_ms)
            hits += have if number >= 60 else 0
        for keys in (chain(f"short{number}", 2), chain(f"long{number}", 20)):
            assert found(table, keys, now_ms) == 0
            store(table, keys, now_ms)
    assert hits >= 0.9 * 2 * 60


def test_a_writer_waits_for_no_eviction_where_room_is_kept() -> None:
    """256 slots, all held, are below 1/128: the worst go until 3 are free, 1/64 of 253. The next 3 find their slots, of
    4 more 1 has to wait. Room is made in steps: 1, and the other 2, though after 1 it is not below the low mark."""
    table = table_of(256)
    for number in range(256):
        store(table, chain(str(number), 1), number)
    assert table.make_room(1_000, 10_000) == 3
    for number in range(3):
        store(table, chain(f"new{number}", 1), 10_001)
    assert table.statistics().evictions_awaited == 0
    assert table.make_room(1_000, 10_001) == 3
    for number in range(4):
        store(table, chain(f"more{number}", 1), 10_002)
    assert table.statistics().evictions_awaited == 1
    assert [table.make_room(1, 10_003), table.make_room(1_000, 10_003), table.make_room(1_000, 10_003)] == [1, 2, 0]


def test_room_is_kept_at_the_cost_of_what_nobody_holds_only() -> None:
    """While everything is leased there is nothing to be had."""
    table = table_of(256)
    store(table, chain("all", 256))
    lease = table.acquire(SALT, chain("all", 256), HOLDER, 0)
    assert isinstance(lease, Acquired)
    assert table.make_room(1_000, 500) == 0
    table.release(lease.lease_id, 500)
    assert table.make_room(1_000, 500) == 3
    assert found(table, chain("all", 256), 500) == 253


def test_stale_entries_do_not_pile_up() -> None:
    """A block used 10,000 times, and 1,000 that have gone, leave no more than 2 entries an alive one, and some."""
    order, used = order_of(), block("used", 0)
    for now_ms in range(10_000, 20_000):
        order.add(used, now_ms)
        order.discard(used)
        fresh = block("fresh", now_ms)
        order.add(fresh, now_ms)
        order.discard(fresh)
    order.add(used, 20_000)
    assert order.least(1, 20_000) is used
    (leaves,) = order._classes[1].values()
    assert len(leaves._oldest) <= 2 * 1 + 128
    assert len(order._fresh[1]) <= 2

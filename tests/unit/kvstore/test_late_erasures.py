"""Erasures that were ordered while a node was away."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from roundhouse.errors import Unavailable
from services.kvstore.adapters.erasure_stream import MarkFile
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.erasure_book import ORDERS_MAX, ErasureBook
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.late_erasures import LateErasures
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import Ordered
from tests.builders.kv_blocks import OTHER_SALT, SALT, UNIT, chain, store
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock


class Orders:
    """`ErasureOrders` in a list."""

    def __init__(self) -> None:
        self.given: list[tuple[str, bytes]] = []
        self.asked: list[int] = []
        self.away = False
        self.away_from: int | None = None  # no answer to those who ask after this

    async def after(self, sequence: int) -> tuple[int, Mapping[bytes, Ordered]]:
        """See `ErasureOrders.after`."""
        if self.away or sequence == self.away_from:
            raise Unavailable("away")
        self.asked.append(sequence)
        found = enumerate(self.given[sequence:], sequence + 1)
        return len(self.given), {sha256(salt).digest(): Ordered(tenant, number) for number, (tenant, salt) in found}


class Node:
    """A node with blocks of two tenants, and its mark in a folder."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.table = BlockTable(SlotArena(16 * UNIT, UNIT, UNIT), "run")
        self.service = BlockService(self.table, FakeArena(16 * UNIT), ManualClock())
        self.told: list[tuple[str, int]] = []
        mark = MarkFile(folder / "mark")
        self.book = ErasureBook(mark.load())
        self.late = LateErasures(self.service, orders, mark, self._tell, self.book)
        store(self.table, chain("a", 3))

    async def _tell(self, tenant: str, blocks: int) -> None:
        self.told.append((tenant, blocks))

    @property
    def left(self) -> int:
        """Blocks of the tenant."""
        return self.table.usage(SALT)[0]


async def test_what_was_ordered_meanwhile_is_done_once(tmp_path: Path) -> None:
    """The order was given before the node came back: 3 blocks go and the audit hears of it. What the tenant stores
    afterwards stays, in this process and, since the mark is on disk, in the next one."""
    orders = Orders()
    orders.given = [("other", OTHER_SALT), ("acme", SALT)]
    node = Node(tmp_path, orders)
    await node.late.catch_up()
    assert (node.left, node.told) == (0, [("acme", 3)])
    store(node.table, chain("a", 3))
    await node.late.catch_up()
    assert node.left == 3
    again = Node(tmp_path, orders)
    await again.late.catch_up()
    assert (again.left, orders.asked) == (3, [0, 2, 0])


async def test_a_new_process_knows_the_orders_of_the_one_before(tmp_path: Path) -> None:
    """Order 2 was carried out by another process: from a node that has read 1 nothing of that tenant may come."""
    orders = Orders()
    orders.given = [("other", OTHER_SALT), ("acme", SALT)]
    await Node(tmp_path, orders).late.catch_up()
    again = Node(tmp_path, orders)
    assert again.book.read_to == 2
    await again.late.catch_up()
    assert [again.book.may_come(SALT, read_to) for read_to in (1, 2)] == [False, True]
    assert again.book.may_come(OTHER_SALT, 1)
    assert again.book.may_come(b"of nobody who was erased", 0)


async def test_a_fault_in_the_middle_of_a_new_stream_leaves_all_of_it_to_do(tmp_path: Path) -> None:
    """The mark is 3, the new stream has 1, and the bus goes away after that was seen: the next turn erases."""
    orders = Orders()
    orders.given = [("x", b"x"), ("y", b"y"), ("z", b"z")]
    node = Node(tmp_path, orders)
    await node.late.catch_up()
    orders.given, orders.away_from = [("acme", SALT)], 0
    await node.late.catch_up()
    assert node.left == 3
    orders.away_from = None
    await node.late.catch_up()
    assert (node.left, MarkFile(tmp_path / "mark").load()) == (0, 1)


def test_the_book_remembers_the_newest_orders_only() -> None:
    """1,001 were read: the first is no longer known. A tenant erased again counts by the newer order."""
    book = ErasureBook()
    book.enter({sha256(b"%d" % number).digest(): number for number in range(1, ORDERS_MAX + 2)})
    assert book.may_come(b"1", 0)
    assert not book.may_come(b"2", 1)
    book.enter({sha256(b"2").digest(): 5_000})
    assert (book.may_come(b"2", 4_999), book.may_come(b"2", 5_000)) == (False, True)


async def test_a_bus_that_is_away_is_asked_again_and_a_new_stream_is_read_whole(tmp_path: Path) -> None:
    """Nothing is marked while it is away. Three orders were read; a stream with one is another stream: it is done."""
    orders = Orders()
    orders.given = [("x", b"x"), ("y", b"y"), ("z", b"z")]
    node = Node(tmp_path, orders)
    orders.away = True
    await node.late.catch_up()
    orders.away = False
    await node.late.catch_up()
    assert MarkFile(tmp_path / "mark").load() == 3
    orders.given = [("acme", SALT)]
    await node.late.catch_up()
    assert (node.left, MarkFile(tmp_path / "mark").load()) == (0, 1)


def test_a_mark_that_cannot_be_read_or_kept_is_nothing(tmp_path: Path) -> None:
    """Then all is done again, which costs a cache and no more."""
    (tmp_path / "mark").write_text("no number")
    assert MarkFile(tmp_path / "mark").load() == 0
    MarkFile(tmp_path / "gone" / "mark").save(7)
    assert MarkFile(None).load() == 0

"""Erasures that were ordered while a node was away."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from roundhouse.errors import Unavailable
from services.kvstore.adapters.erasure_stream import MarkFile
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.late_erasures import LateErasures
from services.kvstore.operations.serve_blocks import BlockService
from tests.builders.kv_blocks import OTHER_SALT, SALT, UNIT, chain, store
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock


class Orders:
    """`ErasureOrders` in a list."""

    def __init__(self) -> None:
        self.given: list[tuple[str, bytes]] = []
        self.asked: list[int] = []
        self.away = False

    async def after(self, sequence: int) -> tuple[int, Mapping[bytes, str]]:
        """See `ErasureOrders.after`."""
        if self.away:
            raise Unavailable("away")
        self.asked.append(sequence)
        return len(self.given), {sha256(salt).digest(): tenant for tenant, salt in self.given[sequence:]}


class Node:
    """A node with blocks of two tenants, and its mark in a folder."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.table = BlockTable(SlotArena(16 * UNIT, UNIT, UNIT), "run")
        self.service = BlockService(self.table, FakeArena(16 * UNIT), ManualClock())
        self.told: list[tuple[str, int]] = []
        self.late = LateErasures(self.service, orders, MarkFile(folder / "mark"), self._tell)
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
    assert (again.left, orders.asked) == (3, [0, 2, 2])


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

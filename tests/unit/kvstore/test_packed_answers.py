"""Reservations and commits in lists of numbers: the same as with a message for each block."""

from roundhouse.block_keys import KEY_BYTES
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.adapters.grpc_servicer import KvStoreServicer, NodeParts
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.announce_changes import ChangeAnnouncer
from services.kvstore.operations.send_blocks import PeerService
from services.kvstore.operations.serve_blocks import BlockService
from tests.builders.kv_blocks import HOLDER, SALT, UNIT
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock

SLOTS = 8


def chain(name: str, count: int) -> list[bytes]:
    """Keys as long as real ones."""
    return [f"{name}{number}".encode().ljust(KEY_BYTES, b".") for number in range(count)]


class Node:
    """A servicer over 8 slots."""

    def __init__(self) -> None:
        """Everything is free."""
        self.clock, arena = ManualClock(), FakeArena(SLOTS * UNIT)
        table = BlockTable(SlotArena(SLOTS * UNIT, UNIT, UNIT), "run")
        self.service = BlockService(table, arena, self.clock)
        peers = PeerService(table, self.service, self.clock)
        self.servicer = KvStoreServicer(NodeParts(self.service, peers, arena, ChangeAnnouncer("a", "run"), UNIT, "run"))

    async def reserve(self, keys: list[bytes], *, packed: bool = True) -> kv_pb2.ReserveBlocksReply:
        """Of a chain from the first block of a prompt."""
        request = kv_pb2.ReserveBlocksRequest(
            salt=SALT, model_digest=b"model", keys=keys, length=UNIT, client_id="writer", packed=packed
        )
        request.lease_ms = HOLDER.lease_ms
        return await self.servicer.ReserveBlocks(request, None)

    async def commit(self, lease_id: str, checksums: list[int]) -> tuple[int, int]:
        """Committed and rejected."""
        reply = await self.servicer.CommitBlocks(
            kv_pb2.CommitBlocksRequest(lease_id=lease_id, checksums=checksums), None
        )
        return reply.committed, reply.rejected

    async def found(self, keys: list[bytes]) -> list[int]:
        """Checksums of the leading run that is stored."""
        request = kv_pb2.AcquirePrefixRequest(salt=SALT, keys=keys, client_id="reader", lease_ms=1_000, packed=True)
        return list((await self.servicer.AcquirePrefix(request, None)).checksums)


async def test_offsets_and_checksums_are_in_the_order_of_the_keys() -> None:
    """And the offsets are those that messages would have had."""
    node, keys = Node(), chain("a", 3)
    reply = await node.reserve(keys)
    places = node.service._table.places(reply.lease_id)
    assert list(reply.offsets) == [places[key].offset for key in keys]
    assert (list(reply.numbers), len(reply.slots)) == ([], 0)
    assert await node.commit(reply.lease_id, [11, 12, 13]) == (3, 0)
    assert await node.found(keys) == [11, 12, 13]


async def test_numbers_say_which_keys_are_new() -> None:
    """Two of four are there already, and have no slot."""
    node, keys = Node(), chain("a", 4)
    await node.commit((await node.reserve(keys[:2])).lease_id, [11, 12])
    reply = await node.reserve(keys)
    assert list(reply.numbers) == [2, 3]
    assert await node.commit(reply.lease_id, [13, 14]) == (2, 0)
    assert await node.found(keys) == [11, 12, 13, 14]


async def test_where_room_ends_the_first_keys_have_slots() -> None:
    """8 slots, 10 keys."""
    node, keys = Node(), chain("a", 10)
    reply = await node.reserve(keys)
    assert (len(reply.offsets), list(reply.numbers)) == (SLOTS, [])
    assert await node.commit(reply.lease_id, list(range(1, 9))) == (8, 0)
    assert await node.found(keys) == list(range(1, 9))


async def test_without_a_checksum_for_each_slot_nothing_is_published() -> None:
    """It could be of any of them; the reservation ends, and its slots are free again."""
    node, keys = Node(), chain("a", 3)
    for checksums in ([11, 12], [11, 12, 13, 14]):
        reply = await node.reserve(keys)
        assert len(reply.offsets) == 3
        assert await node.commit(reply.lease_id, checksums) == (0, len(checksums))
        assert await node.found(keys) == []


async def test_a_lease_that_has_ended_publishes_nothing() -> None:
    """By a commit before, or by time; all is rejected."""
    node, keys = Node(), chain("a", 2)
    reply = await node.reserve(keys[:1])
    assert await node.commit(reply.lease_id, [11]) == (1, 0)
    assert await node.commit(reply.lease_id, [11]) == (0, 1)
    late = await node.reserve(keys)
    node.clock.advance(HOLDER.lease_ms + 1)
    assert await node.commit(late.lease_id, [12]) == (0, 1)
    assert await node.found(keys) == [11]


async def test_a_caller_that_asks_for_messages_gets_them() -> None:
    """As before there were lists."""
    node, keys = Node(), chain("a", 2)
    reply = await node.reserve(keys, packed=False)
    assert [slot.key for slot in reply.slots] == keys
    assert list(reply.offsets) == []

"""What other nodes get of this one, and what is kept for them."""

import asyncio
from contextlib import aclosing

from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.holds import HOLDS_MIN, HoldBook
from services.kvstore.domain.records import NOTHING_SHARED, Holder, Missed, Reserved
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.send_blocks import PeerService
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import PeerRequest
from tests.builders.kv_blocks import HOLDER, MODEL, OTHER_SALT, SALT, UNIT, chain, new_blocks, store
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock

HANDLE = Holder("request-1/1", lease_ms=10_000)


class Node:
    """A node of 8 slots that others ask."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.table = BlockTable(SlotArena(8 * UNIT, UNIT, UNIT), "run")
        self.service = BlockService(self.table, FakeArena(8 * UNIT), self.clock)
        self.peers = PeerService(self.table, self.service, self.clock)

    async def sent(self, keys: list[bytes], salt: bytes = SALT, skip: int = 0, hold: str = "") -> list[bytes]:
        """Keys that a peer without patience gets."""
        request = PeerRequest(salt, tuple(keys), skip, 0, hold=hold)
        async with aclosing(self.peers.send(request)) as parts:
            return [block.place.key async for part in parts for block in part]

    async def hold(self, keys: list[bytes], salt: bytes = SALT, wait_ms: int = 0) -> int:
        """Blocks that are held under `HANDLE`."""
        return await self.peers.hold(salt, tuple(keys), HANDLE, wait_ms, NOTHING_SHARED)

    def flood(self) -> None:
        """8 other blocks want the 8 slots."""
        store(self.table, chain("flood", 8))


async def test_a_peer_gets_the_stored_run_after_what_it_has() -> None:
    """3 of 5 are stored and the peer has 1: 2 blocks with their model, and no lease is left."""
    node, keys = Node(), chain("a", 5)
    store(node.table, keys[:3])
    assert await node.sent(keys, skip=1) == keys[1:3]
    assert node.table.model_digest(keys[1]) == MODEL
    assert (node.service.statistics().leases, node.peers.counts().sent) == (0, 2)
    assert await node.sent(keys, OTHER_SALT) == []


async def test_a_sender_waits_for_blocks_that_are_being_computed() -> None:
    """2 blocks are there; the third is committed while the peer waits, and comes."""
    node, keys = Node(), chain("a", 3)
    store(node.table, keys[:2])
    request = PeerRequest(SALT, tuple(keys), 0, 5_000, hold="request-1/1")
    async with aclosing(node.peers.send(request)) as blocks:
        assert [(await anext(blocks))[0].place.key for _ in range(2)] == keys[:2]
        third = asyncio.ensure_future(anext(blocks))
        await asyncio.sleep(0)
        assert not third.done()
        reserved = node.service.reserve(new_blocks(keys[2:], parent=keys[1]), HOLDER)
        assert isinstance(reserved, Reserved)
        await node.service.commit(reserved.lease_id, {keys[2]: 1})
        async with asyncio.timeout(30):
            assert (await third)[0].place.key == keys[2]


async def test_small_blocks_come_in_parts_of_a_size() -> None:
    """5 blocks, 2 to a part that has room for two and a half; the lease ends with the last one."""
    node, keys = Node(), chain("a", 5)
    store(node.table, keys)
    request = PeerRequest(SALT, tuple(keys), 0, 0)
    async with aclosing(node.peers.send(request, bytes_max=5 * node.table.usage(SALT)[1] // 10)) as parts:
        found = [[block.place.key for block in part] async for part in parts]
    assert found == [keys[:2], keys[2:4], keys[4:]]
    assert (node.service.statistics().leases, node.peers.counts().sent) == (0, 5)


async def test_a_receiver_that_leaves_holds_nothing() -> None:
    """It takes one of 3 and goes."""
    node, keys = Node(), chain("a", 3)
    store(node.table, keys)
    async with aclosing(node.peers.send(PeerRequest(SALT, tuple(keys), 0, 0))) as blocks:
        await anext(blocks)
        assert node.service.statistics().leases == 1
    assert node.service.statistics().leases == 0


async def test_a_held_chain_outlives_everything_but_its_time() -> None:
    """The arena is flooded: the 3 held blocks stay. After 10,000 ms the flood takes them."""
    node, keys = Node(), chain("a", 3)
    store(node.table, keys)
    assert await node.hold(keys) == 3
    node.flood()
    assert node.table.run_length(SALT, keys) == 3
    assert node.peers.counts().holds == 1
    node.clock.advance(10_000)
    await node.service.expire_leases()
    assert node.peers.counts().holds == 0
    store(node.table, chain("other", 8), 10_000)
    assert node.table.run_length(SALT, keys) == 0


async def test_a_hold_is_renewed_and_extended_by_its_name() -> None:
    """2 blocks first, then 4, at 9,000 ms: one hold, which lives at 15,000 ms."""
    node, keys = Node(), chain("a", 4)
    store(node.table, keys[:2])
    assert await node.hold(keys) == 2
    store(node.table, keys[2:], parent=keys[1])
    node.clock.advance(9_000)
    assert await node.hold(keys) == 4
    node.clock.advance(6_000)
    await node.service.expire_leases()
    assert (node.peers.counts().holds, node.service.statistics().leases) == (1, 1)


async def test_who_fetches_all_of_it_ends_the_hold() -> None:
    """A peer that takes 2 of 3 leaves it; the one that takes the last block ends it."""
    node, keys = Node(), chain("a", 3)
    store(node.table, keys)
    await node.hold(keys)
    request = PeerRequest(SALT, tuple(keys), 0, 0, hold=HANDLE.client_id)
    async with aclosing(node.peers.send(request)) as blocks:
        await anext(blocks)
    assert node.peers.counts().holds == 1
    assert await node.sent(keys, hold=HANDLE.client_id) == keys
    assert node.peers.counts().holds == 0


async def test_a_hold_waits_for_what_is_being_written_and_holds_nothing_of_nobody() -> None:
    """Nothing is stored: 0. With patience it holds what is committed meanwhile. Another salt ends nothing."""
    node, keys = Node(), chain("a", 1)
    assert await node.hold(keys) == 0
    waiting = asyncio.ensure_future(node.hold(keys, wait_ms=5_000))
    await asyncio.sleep(0)
    reserved = node.service.reserve(new_blocks(keys), HOLDER)
    assert isinstance(reserved, Reserved)
    await node.service.commit(reserved.lease_id, {keys[0]: 1})
    async with asyncio.timeout(30):
        assert await waiting == 1
    assert not node.peers.release_hold(OTHER_SALT, HANDLE.client_id)
    assert node.peers.release_hold(SALT, HANDLE.client_id)
    assert not node.peers.release_hold(SALT, HANDLE.client_id)


async def test_what_was_sent_is_no_use() -> None:
    """Hits and misses are of this node's engines; a peer changes neither."""
    node, keys = Node(), chain("a", 2)
    store(node.table, keys)
    await node.sent([*keys, b"more"])
    counts = node.service.statistics()
    assert (counts.hits, counts.misses) == (0, 0)
    assert node.service.acquire(SALT, [b"none"], HOLDER) == Missed()


async def test_what_a_peer_waits_for_is_held_as_it_is_stored() -> None:
    """2 of 4 blocks are computed; the peer has taken one when 6 others flood the 8 slots: both stay, and are held until
    the last one has been sent."""
    node, keys = Node(), chain("a", 4)
    store(node.table, keys[:2])
    request = PeerRequest(SALT, tuple(keys), 0, 5_000, hold=HANDLE.client_id)
    async with aclosing(node.peers.send(request)) as blocks:
        assert [(await anext(blocks))[0].place.key for _ in range(2)] == keys[:2]
        third = asyncio.ensure_future(anext(blocks))
        await asyncio.sleep(0)
        assert node.peers.counts().holds == 1
        store(node.table, chain("flood", 6))
        store(node.table, keys[2:], parent=keys[1])
        assert node.table.run_length(SALT, keys) == 4
        reserved = node.service.reserve(new_blocks(chain("news", 1)), HOLDER)  # whatever is stored wakes the sender
        assert isinstance(reserved, Reserved)
        await node.service.commit(reserved.lease_id, {chain("news", 1)[0]: 1})
        async with asyncio.timeout(30):
            assert [(await third)[0].place.key, (await anext(blocks))[0].place.key] == keys[2:]
        assert [block async for block in blocks] == []
    assert (node.peers.counts().holds, node.service.statistics().leases) == (0, 0)


async def test_holds_that_ended_by_themselves_are_forgotten_though_nobody_counts_them() -> None:
    """Each of 1,000 requests holds a chain for 10 s and is never heard of again: no more than a few are remembered."""
    node, keys = Node(), chain("a", 1)
    store(node.table, keys)
    book = HoldBook(node.table)
    for number in range(1_000):
        book.hold(SALT, keys, Holder(f"request-{number}/1", lease_ms=10_000), node.clock.monotonic_ms())
        node.clock.advance(10_000)
    assert book.remembered <= 2 * HOLDS_MIN

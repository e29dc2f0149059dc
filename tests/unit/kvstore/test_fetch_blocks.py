"""What comes from other nodes: right blocks or none, in their slots, from whoever has them."""

import asyncio
import random
from collections.abc import Callable
from hashlib import sha256

import pytest
import structlog

from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.erasure_book import ErasureBook
from services.kvstore.domain.peer_directory import PeerDirectory
from services.kvstore.domain.records import Acquired, Reserved, Shared
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.fetch_blocks import ERASED_QUIET_MS, REST_MS, PeerTier, Wanted
from services.kvstore.operations.serve_blocks import BlockService
from tests.builders.kv_blocks import HOLDER, OTHER_SALT, SALT, UNIT, chain, content_of, new_blocks, read_rightly, store
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock
from tests.fakes.peers import FakePeer, FakePeers

KEYS = chain("a", 10)


def content(key: bytes) -> bytes:
    """What the block of a key holds."""
    return content_of(key, UNIT)


def peer_with(keys: list[bytes], salt: bytes = SALT, **wrong: object) -> FakePeer:
    """A peer that stored them."""
    return FakePeer(salt, {key: content(key) for key in keys}, **wrong)  # type: ignore[arg-type]


class Node:
    """A node of 16 slots whose peers are fakes."""

    def __init__(self, units: int = 16, **peers: FakePeer) -> None:
        self.clock = ManualClock()
        self.arena = FakeArena(units * UNIT)
        self.table = BlockTable(SlotArena(units * UNIT, UNIT, UNIT), "run")
        self.transport = FakePeers(dict(peers))
        self.directory = PeerDirectory("own")
        self.book = ErasureBook()
        self.tier = PeerTier(self.table, self.arena, self.transport, self.directory, self.clock, self.book)
        self.service = BlockService(self.table, self.arena, self.clock, peers=self.tier)

    def knows(self, address: str, keys: list[bytes]) -> None:
        """The directory has heard what a peer has."""
        self.directory.node_seen(address, address, 0)
        self.directory.snapshot(address, "run", 0, keys)

    async def found(
        self, keys: list[bytes] = KEYS, salt: bytes = SALT, peers: tuple[str, ...] = (), **details: object
    ) -> int:
        """How many leading blocks a reader who waits gets; each is byte for byte what the peer stored."""
        wanted = Wanted(salt, tuple(keys), peers=peers, **details)  # type: ignore[arg-type]
        return await read_rightly(self.service, self.arena, wanted, 1_000)

    def store(self, keys: list[bytes]) -> None:
        """Blocks of this node's own engines."""
        reserved = self.table.reserve(new_blocks(keys), HOLDER, 0)
        assert isinstance(reserved, Reserved)
        for place in reserved.slots:
            with self.arena.view(place.offset, UNIT) as view:
                view[:] = content(place.key)
        self.table.release(reserved.lease_id, 0)
        store(self.table, keys)


async def test_a_miss_here_is_fetched_from_whoever_is_named() -> None:
    """10 blocks of the peer, in batches of 1, 2, 4 and the rest; none is left reserved."""
    node = Node(p=peer_with(KEYS))
    assert await node.found(peers=("p",)) == 10
    assert node.tier.counts().fetched == 10
    assert node.tier.counts().bytes_fetched == 10 * UNIT
    counts = node.service.statistics()
    assert (counts.units_held, counts.leases) == (10, 0)


async def test_the_directory_names_peers_too_and_only_the_rest_is_asked_for() -> None:
    """4 of 10 are here: the peer is asked to skip 4."""
    node = Node(p=peer_with(KEYS))
    node.knows("p", KEYS)
    node.store(KEYS[:4])
    assert await node.found() == 10
    assert [request.skip for request in node.transport.peers["p"].asked] == [4]
    assert node.tier.counts().fetched == 6


async def test_without_time_to_wait_or_a_peer_nobody_is_asked() -> None:
    """wait_ms 0 asks memory only; without peers a wait ends at once."""
    node = Node(p=peer_with(KEYS))
    wanted = Wanted(SALT, tuple(KEYS), peers=("p",))
    assert not isinstance(await node.service.acquire_waiting(wanted, HOLDER, 0), Acquired)
    assert await node.found() == 0
    assert node.transport.peers["p"].asked == []


async def test_another_tenants_blocks_do_not_come() -> None:
    """Invariant 11: the peer has them under another salt."""
    node = Node(p=peer_with(KEYS, OTHER_SALT))
    assert await node.found(peers=("p",)) == 0


async def test_a_wrong_block_ends_the_run_and_is_counted() -> None:
    """The third of 10 came with bytes that are not its checksum's: 2 are found, 1 counted, nothing stays reserved."""
    node = Node(p=peer_with(KEYS, checksums={KEYS[2]: 1}))
    assert await node.found(peers=("p",)) == 2
    assert node.tier.counts().corrupt == 1
    assert node.service.statistics().units_held == 2


async def test_a_peer_that_fails_leaves_what_came_and_is_left_alone() -> None:
    """It fails after 5: 5 stay, and the second peer is asked for the rest. For a second nobody asks the first one."""
    node = Node(p=peer_with(KEYS, fails_after=5), q=peer_with(KEYS))
    assert await node.found(peers=("p", "q")) == 10
    assert [request.skip for request in node.transport.peers["q"].asked] == [5]
    assert node.tier.counts().failures == 1
    await node.found(chain("b", 1), peers=("p",))
    assert len(node.transport.peers["p"].asked) == 1
    node.clock.advance(REST_MS)
    await node.found(chain("b", 1), peers=("p",))
    assert len(node.transport.peers["p"].asked) == 2


async def test_a_dead_peer_is_a_miss() -> None:
    """Nobody listens at its address."""
    node = Node()
    assert await node.found(peers=("gone",)) == 0
    assert node.tier.counts().failures == 1


async def test_without_room_what_fits_comes() -> None:
    """4 slots: the chain of 10 pins its own parents, so 4 come, and nothing is evicted for the rest."""
    node = Node(units=4, p=peer_with(KEYS))
    assert await node.found(peers=("p",)) <= 4
    assert node.service.statistics().leases == 0


async def test_a_shared_beginning_comes_under_the_groups_salt() -> None:
    """3 blocks of the group's, 7 of the tenant's: the chain is found with both salts, not with the tenant's only."""
    group = b"group"
    peer = FakePeer(SALT, {key: content(key) for key in KEYS})
    node = Node(p=peer)
    assert await node.found(peers=("p",), shared=Shared(group, 3)) == 10
    assert [node.table.usage(salt)[0] for salt in (group, SALT)] == [3, 7]
    assert await node.found(salt=SALT) == 0  # without the group's salt


async def test_nothing_of_an_erased_tenant_comes_back_at_once() -> None:
    """The erasure has not reached the peer yet: for 30 s its blocks are not fetched again."""
    node = Node(p=peer_with(KEYS))
    assert await node.found(peers=("p",)) == 10
    await node.service.erase_salt(SALT)
    assert await node.found(peers=("p",)) == 0
    node.clock.advance(ERASED_QUIET_MS)
    assert await node.found(peers=("p",)) == 10


async def test_who_has_not_carried_out_an_erasure_yet_gives_nothing_of_that_tenant() -> None:
    """The peer was away when order 8 came, and is back after this node's quiet time: nothing of the erased tenant comes
    from it, nor what lies below a group's beginning; other tenants' blocks do. Once it has read the order, all do."""
    node = Node(p=peer_with(KEYS), other=peer_with(KEYS, OTHER_SALT))
    node.book.enter({sha256(SALT).digest(): 8})
    assert await node.found(peers=("p",)) == 0
    assert await node.found(peers=("p",), shared=Shared(b"group", 3)) == 0
    assert await node.found(peers=("other",), salt=OTHER_SALT) == 10
    await node.service.erase_salt(OTHER_SALT)
    node.transport.peers["p"].erasures_read = 8
    assert await node.found(peers=("p",)) == 10


async def test_what_nobody_expected_of_a_peer_is_a_miss_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transport fails by no fault that it knows: the request goes on, nothing stays leased, and the log has it."""
    node = Node(p=peer_with(KEYS))

    async def broken(*_: object, **__: object) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr(node.transport, "fetch", broken)
    with structlog.testing.capture_logs() as logs:
        assert await node.found(peers=("p",)) == 0
        await asyncio.sleep(0)
    assert [entry["event"] for entry in logs] == ["peer_exchange_failed"]
    assert node.service.statistics().leases == 0


async def test_a_peer_that_speaks_of_empty_blocks_is_a_miss() -> None:
    """A block of no bytes is none."""
    node = Node(p=FakePeer(SALT, dict.fromkeys(KEYS, b"")))
    assert await node.found(peers=("p",)) == 0
    assert node.service.statistics().leases == 0


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_peers_do_only_right_blocks_are_found(seed: int) -> None:
    """Fuzz: peers with gaps, lies and faults; `found` compares every byte, and the books balance."""
    chance = random.Random(seed)
    node = Node(
        units=chance.choice((4, 16)),
        **{
            name: peer_with(
                [key for key in KEYS if chance.random() < 0.9],
                checksums={key: 7 for key in KEYS if chance.random() < 0.1},
                fails_after=chance.choice((None, None, 3)),
            )
            for name in "pqr"
        },
    )
    for _ in range(6):
        await node.found(KEYS[: chance.randrange(1, 11)], peers=tuple(chance.sample("pqr", 2)))
        node.clock.advance(REST_MS)
        counts = node.service.statistics()
        assert counts.units_free + counts.units_held == counts.units_total
        assert counts.leases == 0


async def test_a_chain_comes_while_it_is_computed_and_its_reader_waits_for_the_same_exchange() -> None:
    """Of 10 blocks the peer has computed 6: they come, those of whole batches, 1 + 2 of 1 + 2 + 4, can be read. A
    reader who asks for all 10 waits with the first; when the last is there both have it, by one exchange."""
    peer = peer_with(KEYS)
    peer.computing = {key: asyncio.Event() for key in KEYS[6:]}
    node = Node(p=peer)
    wanted = Wanted(SALT, tuple(KEYS), peers=("p",), hold="r/1")
    bringing = asyncio.ensure_future(node.service.bring(wanted, 30_000))
    await until(lambda: node.table.run_length(SALT, KEYS) == 3)
    reading = asyncio.ensure_future(node.service.acquire_waiting(wanted, HOLDER, 5_000))
    for event in peer.computing.values():
        await asyncio.sleep(0)
        assert not bringing.done()
        assert not reading.done()
        event.set()
    async with asyncio.timeout(30):
        assert await bringing == 10
        outcome = await reading
    assert isinstance(outcome, Acquired)
    assert len(outcome.blocks) == 10
    assert [request.skip for request in peer.asked] == [0]


async def test_whoever_leaves_last_ends_an_exchange_that_waits_for_a_computation() -> None:
    """The prefill died: its gateway cancels. As long as a reader waits the exchange goes on; alone it ends at once, and
    nothing stays reserved. What came stays."""
    peer = peer_with(KEYS)
    peer.computing = {KEYS[2]: asyncio.Event()}
    node = Node(p=peer)
    wanted = Wanted(SALT, tuple(KEYS), peers=("p",), hold="r/1")
    bringing = asyncio.ensure_future(node.service.bring(wanted, 30_000))
    await until(lambda: node.table.run_length(SALT, KEYS) == 1)
    reading = asyncio.ensure_future(node.service.bring(wanted, 30_000))
    await asyncio.sleep(0)
    bringing.cancel()
    await asyncio.wait({bringing})
    assert (peer.left, reading.done()) == (0, False)
    reading.cancel()
    await asyncio.wait({reading})
    await until(lambda: peer.left == 1)
    assert node.table.run_length(SALT, KEYS) == 2
    assert node.service.statistics().leases == 0
    assert await node.found(peers=("p",)) == 10  # the next one asks anew


async def test_a_chain_that_is_withheld_ends_with_the_wait() -> None:
    """The third block never comes: at the end of the wait there are 2, and the caller is told so."""
    peer = peer_with(KEYS[:2])
    node = Node(p=peer)
    assert await node.service.bring(Wanted(SALT, tuple(KEYS), peers=("p",), hold="r/1"), 1_000) == 2
    assert await node.service.bring(Wanted(SALT, tuple(KEYS[:2])), 1_000) == 2, "all is here: nobody is asked"
    assert await Node().service.bring(Wanted(SALT, tuple(KEYS), peers=("gone",), hold="r/1"), 1_000) == 0


async def until(true: Callable[[], bool]) -> None:
    """Let the others run until it is so."""
    for _ in range(1_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")

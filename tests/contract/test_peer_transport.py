"""What every way to another node does: over gRPC to a real servicer, and the fake of the tests."""

import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import grpc
import pytest
import xxhash

from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.kvstore.adapters import grpc_servicer, nixl_agent
from services.kvstore.adapters.grpc_peers import GrpcPeers
from services.kvstore.adapters.grpc_servicer import KvStoreServicer, NodeParts
from services.kvstore.adapters.nixl_agent import NixlAgent
from services.kvstore.adapters.nixl_peers import NixlPeers
from services.kvstore.adapters.shm_arena import shm_arena
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.erasure_book import ErasureBook
from services.kvstore.domain.records import Reserved
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.announce_changes import ChangeAnnouncer
from services.kvstore.operations.send_blocks import PeerService
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import BlockArena, BlockHead, PeerFault, PeerKeys, PeerRequest, PeerTransport
from tests.builders.kv_blocks import HOLDER, MODEL, OTHER_SALT, SALT, new_blocks
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock
from tests.fakes.peers import FakePeer, FakePeers

LENGTH = 5_000
PIECES = (2_048, 12_000)  # three pieces a block; two blocks a message
KEYS = [bytes([number]) * 32 for number in range(4)]
CONTENT = {key: random.Random(key).randbytes(LENGTH) for key in KEYS}


class Basket:
    """A landing that keeps what comes, up to a number of blocks."""

    def __init__(self, blocks_max: int = 100) -> None:
        self.blocks_max = blocks_max
        self.heads: list[BlockHead] = []
        self.blocks: list[bytearray] = []
        self.complete = 0

    def begin(self, head: BlockHead) -> memoryview | None:
        """A place of its own."""
        if self.complete == self.blocks_max:
            return None
        self.heads.append(head)
        self.blocks.append(bytearray(head.length))
        return memoryview(self.blocks[-1])

    def landed(self) -> None:
        """One more."""
        self.complete += 1


@asynccontextmanager
async def grpc_peer() -> AsyncIterator[tuple[PeerTransport, str]]:
    """A real server with the 4 blocks."""
    async with serving(FakeArena(8 * 8_192)) as address:
        transport = GrpcPeers()
        yield transport, address
        await transport.close()


@asynccontextmanager
async def old_peer() -> AsyncIterator[tuple[PeerTransport, str]]:
    """The same server, which knows nothing of NIXL, asked by a node that does."""
    agent = nixl("nixl-ucx", "near")
    async with serving(FakeArena(8 * 8_192)) as address:
        transport = NixlPeers(agent, GrpcPeers())
        yield transport, address
        await transport.close()
    agent.close()


@asynccontextmanager
async def nixl_peer(kind: str) -> AsyncIterator[tuple[PeerTransport, str]]:
    """A real server and two NIXL agents, one at each end."""
    near, far = nixl(kind, "near"), nixl(kind, "far")
    with tempfile.TemporaryDirectory() as folder, shm_arena(f"{folder}/arena", 8 * 8_192) as arena:
        async with serving(arena, far.offer(arena, "run")) as address:
            transport = NixlPeers(near, GrpcPeers())
            yield transport, address
            assert transport.asked_plainly() == frozenset()
            await transport.close()
        near.close()
        far.close()


def nixl(kind: str, name: str) -> NixlAgent:
    """An agent, if NIXL is installed."""
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: make test-nixl")
    return NixlAgent(kind, name)


@asynccontextmanager
async def serving(arena: BlockArena, source: kv_pb2.TransferSource | None = None) -> AsyncIterator[str]:
    """A real server with the 4 blocks; its address."""
    clock = ManualClock()
    table = BlockTable(SlotArena(8 * 8_192, 8_192, 8_192), "run")
    service = BlockService(table, arena, clock)
    reserved = service.reserve(new_blocks(KEYS, length=LENGTH), HOLDER)
    assert isinstance(reserved, Reserved)
    for place in reserved.slots:
        arena.view(place.offset, LENGTH)[:] = CONTENT[place.key]
    await service.commit(reserved.lease_id, {key: xxhash.xxh3_64_intdigest(CONTENT[key]) for key in KEYS})
    announcer, source = ChangeAnnouncer("n1", "run"), source or kv_pb2.TransferSource()
    peers = PeerService(table, service, clock, ErasureBook(7))
    parts = NodeParts(service, peers, arena, announcer, 8_192, "run", source)
    server = grpc.aio.server()
    kv_pb2_grpc.add_KvStoreServicer_to_server(KvStoreServicer(parts), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def fake_peer() -> AsyncIterator[tuple[PeerTransport, str]]:
    """The same blocks."""
    transport = FakePeers({"peer": FakePeer(SALT, CONTENT, erasures_read=7)})
    transport.snapshots["peer"] = PeerKeys("n1", "run", 0, frozenset(KEYS))
    yield transport, "peer"


PEERS: dict[str, Callable[[], AbstractAsyncContextManager[tuple[PeerTransport, str]]]] = {
    "grpc": grpc_peer,
    "fake": fake_peer,
    "nixl-ucx": partial(nixl_peer, "nixl-ucx"),
    "nixl-posix": partial(nixl_peer, "nixl-posix"),
    "nixl asks grpc": old_peer,
}


@pytest.fixture(params=PIECES)
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What fits a message."""
    monkeypatch.setattr(grpc_servicer, "PIECE_BYTES", request.param)
    return int(request.param)


@pytest.fixture(params=list(PEERS.values()), ids=list(PEERS))
async def peer(request: pytest.FixtureRequest, piece_bytes: int) -> AsyncIterator[tuple[PeerTransport, str]]:
    """A transport and the address of a peer with 4 blocks of `SALT`."""
    async with request.param() as parts:
        yield parts


async def fetched(
    peer: tuple[PeerTransport, str], keys: list[bytes], salt: bytes = SALT, skip: int = 0, blocks_max: int = 100
) -> Basket:
    """What lands."""
    basket = Basket(blocks_max)
    await peer[0].fetch(peer[1], PeerRequest(salt, tuple(keys), skip, 0), basket, timeout_ms=30_000)
    return basket


async def test_blocks_come_whole_in_order_with_their_names(peer: tuple[PeerTransport, str]) -> None:
    """4 blocks of 5,000 bytes, each with its key, checksum and model, and up to which order the peer has erased."""
    basket = await fetched(peer, KEYS)
    assert basket.complete == 4
    assert [bytes(block) for block in basket.blocks] == [CONTENT[key] for key in KEYS]
    assert [(head.key, head.length, head.model_digest) for head in basket.heads] == [
        (key, LENGTH, MODEL) for key in KEYS
    ]
    assert {head.erasures_read for head in basket.heads} == {7}
    assert basket.heads[0].checksum == xxhash.xxh3_64_intdigest(CONTENT[KEYS[0]])


async def test_what_the_caller_has_is_left_out(peer: tuple[PeerTransport, str]) -> None:
    """Of 4 blocks the caller has 3."""
    assert [head.key for head in (await fetched(peer, KEYS, skip=3)).heads] == KEYS[3:]


async def test_the_run_ends_at_the_first_block_that_is_not_there(peer: tuple[PeerTransport, str]) -> None:
    """No error: the fifth is missing."""
    assert (await fetched(peer, [*KEYS, b"x" * 32])).complete == 4
    assert (await fetched(peer, [b"x" * 32])).complete == 0


async def test_another_salt_gets_nothing(peer: tuple[PeerTransport, str]) -> None:
    """Invariant 11 holds between nodes."""
    assert (await fetched(peer, KEYS, OTHER_SALT)).complete == 0


async def test_a_landing_that_wants_no_more_ends_it(peer: tuple[PeerTransport, str]) -> None:
    """2 are taken, the third is refused, and that is no fault."""
    assert (await fetched(peer, KEYS, blocks_max=2)).complete == 2


async def test_nobody_there_is_a_fault(peer: tuple[PeerTransport, str]) -> None:
    """Both questions."""
    with pytest.raises(PeerFault):
        await peer[0].fetch("127.0.0.1:1", PeerRequest(SALT, tuple(KEYS), 0, 0), Basket(), timeout_ms=500)
    with pytest.raises(PeerFault):
        await peer[0].snapshot("127.0.0.1:1", 8, timeout_ms=500)


async def test_a_peer_that_keeps_one_waiting_is_a_fault_when_the_time_is_up() -> None:
    """It waits for a fifth block that nobody computes, longer than it is given; the 4 that came stay."""
    async with grpc_peer() as (transport, address):
        basket = Basket()
        request = PeerRequest(SALT, (*KEYS, b"x" * 32), 0, 10_000, hold="request-1/1")
        with pytest.raises(PeerFault):
            await transport.fetch(address, request, basket, timeout_ms=500)
    assert basket.complete == 4


async def test_a_snapshot_has_every_key_and_its_sequence(peer: tuple[PeerTransport, str]) -> None:
    """8 bytes of each."""
    found = await peer[0].snapshot(peer[1], 8, timeout_ms=30_000)
    assert found == PeerKeys("n1", "run", 0, frozenset(key[:8] for key in KEYS))


async def test_who_does_not_ask_for_several_blocks_in_a_message_gets_one() -> None:
    """A node of an older release: 4 messages; one that asks gets 4 blocks in one, in order."""
    async with serving(FakeArena(8 * 8_192)) as address, grpc.aio.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        request = kv_pb2.FetchRequest(salt=SALT, keys=KEYS)
        assert [(piece.key, len(piece.also)) async for piece in stub.Fetch(request)] == [(key, 0) for key in KEYS]
        request.packed = True
        messages = [message async for message in stub.Fetch(request)]
        assert [piece.key for message in messages for piece in (message, *message.also)] == KEYS
        assert len(messages) == 1


class BrokenPeer(kv_pb2_grpc.KvStoreServicer):
    """Sends the pieces it is given."""

    def __init__(self, pieces: list[kv_pb2.FetchPiece]) -> None:
        self.pieces = pieces

    async def Fetch(self, request: object, context: object) -> AsyncIterator[kv_pb2.FetchPiece]:
        """As told."""
        for piece in self.pieces:
            yield piece


def head(length: int, data: bytes) -> kv_pb2.FetchPiece:
    """The first piece of a block."""
    return kv_pb2.FetchPiece(key=KEYS[0], length=length, checksum=1, model_digest=MODEL, data=data)


def with_also(first: kv_pb2.FetchPiece, *others: kv_pb2.FetchPiece) -> kv_pb2.FetchPiece:
    """Several blocks in one message."""
    first.also.extend(others)
    return first


@pytest.mark.parametrize(
    "pieces",
    [
        [kv_pb2.FetchPiece(data=b"bytes of nothing")],
        [head(4, b"too much")],
        [head(9, b"short")],
        [head(9, b"short"), head(9, b"another")],
        [head(4, b"1234"), kv_pb2.FetchPiece(data=b"more")],
        [kv_pb2.FetchPiece(also=[head(4, b"1234")])],
        [with_also(head(9, b"short"), head(4, b"1234"))],
        [with_also(head(4, b"1234"), head(9, b"short"))],
    ],
    ids=[
        "headless",
        "too long",
        "cut",
        "overtaken",
        "after the end",
        "nothing first",
        "overtaken inside",
        "cut inside",
    ],
)
async def test_pieces_that_do_not_fit_are_a_fault(pieces: list[kv_pb2.FetchPiece]) -> None:
    """Nothing is written outside of the block's place, and an incomplete block never lands."""
    server = grpc.aio.server()
    broken: kv_pb2_grpc.KvStoreServicer = BrokenPeer(pieces)  # type: ignore[abstract]
    kv_pb2_grpc.add_KvStoreServicer_to_server(broken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport, basket = GrpcPeers(), Basket()
    try:
        request = PeerRequest(SALT, tuple(KEYS), 0, 0)
        with pytest.raises(PeerFault):
            await transport.fetch(f"127.0.0.1:{port}", request, basket, timeout_ms=30_000)
        assert basket.complete <= 1
    finally:
        await transport.close()
        await server.stop(None)

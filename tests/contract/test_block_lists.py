"""`BlockLists`: the fake and the gRPC adapter answer alike, and a follower needs one list after a loss."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from roundhouse.errors import Unavailable
from roundhouse.grpc_edge import GrpcServer
from roundhouse.vocabulary import NodeId
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc, loading_pb2
from services.scheduler.adapters import grpc_kvstores
from services.scheduler.adapters.grpc_kvstores import GrpcBlockLists
from services.scheduler.domain.prefix_index import PrefixIndex
from services.scheduler.operations.blocks import BlockFollower
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.ports import BlockList, BlockLists
from tests.fakes.block_lists import FakeBlockLists
from tests.fakes.clock import ManualClock

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(5)]
Setting = Callable[[], AbstractAsyncContextManager[tuple[BlockLists, str]]]


class _KvStore(kv_pb2_grpc.KvStoreServicer):
    """Sends its keys in parts of two, cut as asked."""

    async def Snapshot(self, request: kv_pb2.SnapshotRequest, context: Any) -> AsyncIterator[kv_pb2.SnapshotPart]:
        for start in range(0, len(KEYS), 2):
            part = b"".join(key[: request.key_bytes] for key in KEYS[start : start + 2])
            yield kv_pb2.SnapshotPart(
                incarnation="a", sequence=7, key_bytes=request.key_bytes, keys=part, total=len(KEYS)
            )


@asynccontextmanager
async def over_grpc() -> AsyncIterator[tuple[BlockLists, str]]:
    server, lists = GrpcServer(), GrpcBlockLists()
    kv_pb2_grpc.add_KvStoreServicer_to_server(_KvStore(), server.server)  # type: ignore[abstract,unused-ignore]
    port = await server.start("127.0.0.1", 0, [])
    try:
        yield lists, f"127.0.0.1:{port}"
    finally:
        await lists.close()
        await server.stop(0)


@asynccontextmanager
async def in_memory() -> AsyncIterator[tuple[BlockLists, str]]:
    lists = FakeBlockLists()
    lists.lists["there"] = BlockList("a", 7, tuple(key[:8] for key in KEYS))
    yield lists, "there"


@pytest.fixture(params=[over_grpc, in_memory], ids=["grpc", "fake"])
def setting(request: pytest.FixtureRequest) -> Setting:
    """Both implementations, with the same list at the address that comes with them."""
    chosen: Setting = request.param
    return chosen


async def test_a_list_has_all_keys_cut_and_its_place_in_the_announcements(setting: Setting) -> None:
    """Eight bytes a key, whatever parts they came in."""
    async with setting() as (lists, address):
        assert await lists.list_blocks(address) == BlockList("a", 7, tuple(key[:8] for key in KEYS))


async def test_a_kvstore_that_is_away_is_unavailable(setting: Setting) -> None:
    """Port 1 has no server."""
    async with setting() as (lists, _):
        with pytest.raises(Unavailable):
            await lists.list_blocks("127.0.0.1:1")


async def test_a_kvstore_that_does_not_answer_in_time_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs: the one error that the port names, so that its follower asks again."""
    monkeypatch.setattr(grpc_kvstores, "TIMEOUT_S", 0.05)

    async def hang(*_: object) -> AsyncIterator[kv_pb2.SnapshotPart]:
        await asyncio.Event().wait()
        yield kv_pb2.SnapshotPart()

    monkeypatch.setattr(_KvStore, "Snapshot", hang)
    async with over_grpc() as (lists, address):
        with pytest.raises(Unavailable):
            await lists.list_blocks(address)


async def test_a_follower_asks_once_for_what_it_lost(setting: Setting) -> None:
    """It hears 7 first; the list is as of 7, and then 8 is in order."""
    async with setting() as (lists, address):
        clock, index = ManualClock(), PrefixIndex()
        nodes = NodeRegistry(clock)
        nodes.observe(loading_pb2.NodeState(node_id="n", sequence=1, incarnation="l", kvstore_address=address))
        follower = BlockFollower(index, lists, nodes, clock)
        follower.observe(kv_pb2.BlockEvents(node_id="n", incarnation="a", sequence=7, stored=[KEYS[4]]))
        async with asyncio.timeout(30):
            while index.cached_blocks(NodeId("n"), KEYS) < len(KEYS):  # noqa: ASYNC110 - a reply over real gRPC
                await asyncio.sleep(0.01)
        follower.observe(kv_pb2.BlockEvents(node_id="n", incarnation="a", sequence=8, dropped=[KEYS[0]]))
        assert index.cached_blocks(NodeId("n"), KEYS) == 0
        await follower.stop()

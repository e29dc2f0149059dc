"""Two kvstores on two nodes: what one has, the other's engines get; what is lost on the way is a miss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.reference.kv_cache import BlockArray, BlockSpace
from engines.reference.kvstore_client import KvStoreClient
from roundhouse import subjects
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import kv_pb2
from services.gateway.adapters.admin_caches import GrpcNodeCaches
from services.kvstore.adapters import nixl_agent
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually
from tests.integration.kvstore.test_two_clients import ONE, SHAPE, TWO, blocks, keys, store

PATIENCE_MS = 5_000


class Node:
    """A kvstore and an engine of its node."""

    def __init__(self, folder: Path, nats_url: str, transport: str) -> None:
        folder.mkdir()
        self.kvstore = KvStoreProcess(folder, nats_url=nats_url, node_id=folder.name, peer_transport=transport)
        self.kvstore.start()
        self.engine = KvStoreClient(self.kvstore.address, SHAPE, b"model")
        assert self.engine.wait_until_mapped(30)

    def found(self, space: BlockSpace, prompt: list[bytes]) -> tuple[BlockArray, ...]:
        """What the engine gets if it waits."""
        prefix = self.engine.lookup(space, prompt, PATIENCE_MS)
        copies = tuple(block.copy() for block in prefix.blocks)
        right = prefix.verified(len(copies))
        prefix.release()
        return copies[:right]

    def peers(self) -> kv_pb2.PeerStatistics:
        """What was exchanged."""
        return self.kvstore.statistics().peers

    def close(self) -> None:
        """Nothing is left."""
        self.engine.close()
        self.kvstore.close()


@pytest.fixture(params=["grpc", "nixl-ucx", "nixl-posix"])
def transport(request: pytest.FixtureRequest) -> str:
    """How blocks come from one to the other."""
    if request.param != "grpc" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: make test-nixl")
    return str(request.param)


@pytest.fixture
def near(tmp_path: Path, nats_url: str, transport: str) -> Iterator[Node]:
    """The node whose engine asks."""
    node = Node(tmp_path / "near", nats_url, transport)
    yield node
    node.close()


@pytest.fixture
def far(tmp_path: Path, nats_url: str, transport: str) -> Iterator[Node]:
    """The node that has the blocks."""
    node = Node(tmp_path / "far", nats_url, transport)
    yield node
    node.close()


@pytest.fixture
async def bus(nats_url: str, near: Node, far: Node) -> AsyncIterator[NatsBus]:
    """The bus, to speak for the loaders; dialled when the nodes are up, because while they start nothing answers its
    server's pings."""
    bus = await NatsBus.connect(nats_url, name="test")
    yield bus
    await bus.close()


def told_by(far: Node, salt: bytes = ONE) -> BlockSpace:
    """A space whose blocks `far` may have."""
    return BlockSpace(salt, peers=(far.kvstore.address,))


def same(mine: list[BlockArray], theirs: tuple[BlockArray, ...]) -> bool:
    """Bit for bit."""
    return len(mine) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_named_peer_gives_its_blocks_bit_for_bit_and_only_once(near: Node, far: Node) -> None:
    """40 blocks come; the second lookup has them in its own memory. Another tenant's salt gets none of them."""
    states = blocks(40)
    store(far.engine, ONE, keys(ONE, 40), states)
    assert near.found(told_by(far, TWO), keys(ONE, 40)) == ()
    eventually(lambda: same(states, near.found(told_by(far), keys(ONE, 40))), within_s=30)
    assert (near.peers().fetched, near.peers().bytes_fetched) == (40, 40 * 4_096)
    assert far.peers().sent == 40
    assert same(states, near.found(BlockSpace(ONE), keys(ONE, 40)))
    assert near.peers().fetched == 40


async def test_who_has_what_is_known_from_the_bus_and_mended_after_a_restart(
    near: Node, far: Node, bus: NatsBus
) -> None:
    """`far` stored 5 blocks before `near` knew it: a snapshot tells. Then 3 more: an event tells. Then `far` is killed
    and starts empty: `near` forgets what it knew."""
    await asyncio.to_thread(store, far.engine, ONE, keys(ONE, 5), blocks(5))
    state = far.kvstore.state().SerializeToString()

    async def known(count: int) -> None:
        for _ in range(300):
            await bus.publish(subjects.node_state("far"), state)
            await bus.client.flush()
            if near.peers().known_keys == count:
                return
            await asyncio.sleep(0.1)  # between two looks at another process
        raise AssertionError(f"{near.peers().known_keys} keys are known instead of {count}")

    await known(5)
    for _ in range(30):  # one patience may be too short on a busy machine
        came = await asyncio.to_thread(near.found, BlockSpace(ONE), keys(ONE, 5))
        if len(came) == 5:
            break
    assert same(blocks(5), came)
    store(far.engine, TWO, keys(TWO, 3), blocks(3))
    await known(8)
    await asyncio.to_thread(far.kvstore.kill)
    await asyncio.to_thread(far.kvstore.start)
    await known(0)


def test_a_block_that_is_wrong_over_there_does_not_come(near: Node, far: Node) -> None:
    """A bit fell over in the third of 4 blocks: 2 come, and the receiver counts it."""
    store(far.engine, ONE, keys(ONE, 4), blocks(4))
    reply = far.kvstore.stub.AcquirePrefix(
        kv_pb2.AcquirePrefixRequest(salt=ONE, keys=keys(ONE, 4), client_id="test", lease_ms=1_000), timeout=30
    )
    far.kvstore.flip_byte(reply.blocks[2].offset + 77)
    eventually(lambda: same(blocks(4)[:2], near.found(told_by(far), keys(ONE, 4))), within_s=30)
    assert near.peers().corrupt >= 1


def test_a_dead_peer_costs_no_error(near: Node, far: Node) -> None:
    """It is killed; the lookup is a miss, and the engine goes on."""
    store(far.engine, ONE, keys(ONE, 4), blocks(4))
    far.kvstore.kill()
    assert near.found(told_by(far), keys(ONE, 4)) == ()
    eventually(lambda: near.peers().failures >= 1, within_s=30)
    store(near.engine, ONE, keys(ONE, 4), blocks(4))
    assert len(near.found(BlockSpace(ONE), keys(ONE, 4))) == 4


def test_a_peer_that_dies_in_the_middle_leaves_right_blocks_only(near: Node, far: Node) -> None:
    """800 blocks are on their way when it is killed: those that came are right, and the rest are misses."""
    states = blocks(800)
    for first in range(0, 800, 200):
        store(far.engine, ONE, keys(ONE, first + 200), states[first : first + 200])
    threading.Timer(0.01, far.kvstore.kill).start()
    came = near.found(told_by(far), keys(ONE, 800))
    assert same(states[: len(came)], came)
    assert near.peers().corrupt == 0
    store(near.engine, TWO, keys(TWO, 4), states[:4])  # of another tenant: some of the 800 may be here
    assert same(states[:4], near.found(BlockSpace(TWO), keys(TWO, 4)))


def test_a_held_prefill_outlives_its_engine_until_decode_has_taken_it(near: Node, far: Node) -> None:
    """`far`'s engine computes 6 blocks, holds them and goes away. 1,100 other blocks want its 1,024 slots; the 6 stay,
    `near` takes them, and then nothing holds them any more."""
    states = blocks(6)
    store(far.engine, ONE, keys(ONE, 6), states)
    held = far.kvstore.stub.HoldPrefix(
        kv_pb2.HoldPrefixRequest(salt=ONE, keys=keys(ONE, 6), handle="request/1", lease_ms=60_000), timeout=30
    )
    assert held.blocks == 6
    far.engine.close()
    other = KvStoreClient(far.kvstore.address, SHAPE, b"model")
    assert other.wait_until_mapped(30)
    for number in range(18):
        store(other, TWO, keys(TWO, 64, first_token=10_000 * number), blocks(64, number))
    other.close()
    assert far.kvstore.statistics().holds == 1
    space = BlockSpace(ONE, peers=(far.kvstore.address,), hold="request/1")
    eventually(lambda: same(states, near.found(space, keys(ONE, 6))), within_s=30)
    eventually(lambda: far.kvstore.statistics().holds == 0, within_s=30)


async def test_an_erased_tenant_is_gone_from_every_node_and_no_node_brings_it_back(near: Node, far: Node) -> None:
    """Both have its 5 blocks. `near` is erased first: it takes nothing from `far`, which still has them. Then `far` is
    erased, by the adapter that the admin API uses: 0 blocks are left on both."""
    store(far.engine, ONE, keys(ONE, 5), blocks(5))
    eventually(lambda: len(near.found(told_by(far), keys(ONE, 5))) == 5, within_s=30)
    caches = GrpcNodeCaches()
    first = await caches.erase(near.kvstore.address, ONE, timeout_ms=30_000)
    assert (first.blocks, first.blocks_left) == (5, 0)
    assert near.found(told_by(far), keys(ONE, 5)) == ()
    second = await caches.erase(far.kvstore.address, ONE, timeout_ms=30_000)
    assert (second.blocks, second.blocks_left) == (5, 0)
    for node in (near, far):
        count = node.kvstore.stub.GetStatistics(kv_pb2.GetStatisticsRequest(salt=ONE), timeout=30)
        assert (count.salt_blocks, count.salt_disk_blocks) == (0, 0)


def test_a_snapshot_has_every_key_once(far: Node) -> None:
    """40 keys, whole and cut to 8 bytes, with the sequence they belong to."""
    store(far.engine, ONE, keys(ONE, 40), blocks(40))
    for size in (8, 32):
        parts = list(far.kvstore.stub.Snapshot(kv_pb2.SnapshotRequest(key_bytes=size), timeout=30))
        joined = b"".join(part.keys for part in parts)
        assert {joined[at : at + size] for at in range(0, len(joined), size)} == {key[:size] for key in keys(ONE, 40)}
        assert (parts[0].node_id, parts[0].total, len(joined)) == ("far", 40, 40 * size)

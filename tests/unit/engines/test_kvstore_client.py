"""The reference engine's kvstore client against a store that misbehaves: everything wrong is a miss."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from engines.reference import kvstore_client
from engines.reference.kv_cache import BlockArray, BlockShape, BlockSpace, open_block_store
from engines.reference.kvstore_client import COOL_DOWN_S, LOOKUP_TIMEOUT_S, KvStoreClient
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

SHAPE = BlockShape(layers=1, kv_heads=1, block_tokens=2, head_dim=4)  # 1*2*1*2*4*4 = 64 bytes
KEYS = [b"%032d" % number for number in range(4)]
SALT = b"tenant"
SPACE = BlockSpace(SALT)


def block(number: int) -> BlockArray:
    """A block full of one number."""
    return np.full(SHAPE.dimensions, number, np.float32)


class LyingStore(kv_pb2_grpc.KvStoreServicer):
    """Answers as told. Its arena holds block n at offset 64 n."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"".join(block(number).tobytes() for number in range(4)))
        self.arena = kv_pb2.Arena(path=str(path), bytes=path.stat().st_size, slot_bytes=64, incarnation="run1")
        self.found: list[kv_pb2.BlockSlot] = []
        self.incarnation = "run1"
        self.delay_s = 0.0
        self.released: list[kv_pb2.ReleaseLeaseRequest] = []
        self.reserved: list[kv_pb2.ReserveBlocksRequest] = []
        self.acquired = 0

    def slot(self, number: int, **wrong: Any) -> kv_pb2.BlockSlot:
        """Where block `number` truly lies, unless told otherwise."""
        checksum = xxhash.xxh3_64_intdigest(block(number).tobytes())
        right: dict[str, Any] = {"key": KEYS[number], "offset": 64 * number, "length": 64, "checksum": checksum}
        return kv_pb2.BlockSlot(**{**right, **wrong})

    def DescribeArena(self, request: Any, context: Any) -> kv_pb2.Arena:
        """The arena."""
        return self.arena

    def AcquirePrefix(self, request: Any, context: Any) -> kv_pb2.AcquirePrefixReply:
        """What was set, late if told to be."""
        self.acquired += 1
        time.sleep(self.delay_s)
        return kv_pb2.AcquirePrefixReply(
            lease_id="l1",
            offsets=[slot.offset for slot in self.found],
            checksums=[slot.checksum for slot in self.found],
            length=self.found[0].length if self.found else 0,
            incarnation=self.incarnation,
        )

    def ReleaseLease(self, request: Any, context: Any) -> kv_pb2.ReleaseLeaseReply:
        """Remembered."""
        self.released.append(request)
        return kv_pb2.ReleaseLeaseReply()

    def CommitBlocks(self, request: Any, context: Any) -> kv_pb2.CommitBlocksReply:
        """Nothing is ever reserved."""
        return kv_pb2.CommitBlocksReply(rejected=len(request.blocks))

    def EraseSalt(self, request: Any, context: Any) -> kv_pb2.EraseSaltReply:
        """Nothing is stored."""
        return kv_pb2.EraseSaltReply()

    def GetStatistics(self, request: Any, context: Any) -> kv_pb2.Statistics:
        """Nothing is counted."""
        return kv_pb2.Statistics()

    def Fetch(self, request: Any, context: Any) -> Iterator[kv_pb2.FetchPiece]:
        """There is no other node."""
        return iter(())

    def Lend(self, request_iterator: Any, context: Any) -> Iterator[kv_pb2.LentBlocks]:
        """Nor this way."""
        return iter(())

    def DescribeTransfer(self, request: Any, context: Any) -> kv_pb2.TransferSource:
        """Nothing is described."""
        return kv_pb2.TransferSource()

    def Snapshot(self, request: Any, context: Any) -> Iterator[kv_pb2.SnapshotPart]:
        """Nor one that asks."""
        return iter(())

    def HoldPrefix(self, request: Any, context: Any) -> kv_pb2.HoldPrefixReply:
        """Nothing is held."""
        return kv_pb2.HoldPrefixReply()

    def ReleaseHold(self, request: Any, context: Any) -> kv_pb2.ReleaseHoldReply:
        """Nothing was held."""
        return kv_pb2.ReleaseHoldReply()

    def BringPrefix(self, request: Any, context: Any) -> kv_pb2.BringPrefixReply:
        """Nothing comes."""
        return kv_pb2.BringPrefixReply()

    def ReserveBlocks(self, request: Any, context: Any) -> kv_pb2.ReserveBlocksReply:
        """Remembered; there is never room."""
        self.reserved.append(request)
        return kv_pb2.ReserveBlocksReply(incarnation=self.incarnation)


@pytest.fixture
def store(tmp_path: Path) -> LyingStore:
    """A store with 4 blocks in its arena, of which lookups find `found`."""
    return LyingStore(tmp_path / "arena")


@pytest.fixture
def address(store: LyingStore) -> Iterator[str]:
    """Where the store listens."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        kv_pb2_grpc.add_KvStoreServicer_to_server(store, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


@pytest.fixture
def client(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvStoreClient]:
    """A client that has found the store; a call before has opened the connection, as in a running engine. It is patient
    for the sake of a busy machine."""
    monkeypatch.setattr(kvstore_client, "LOOKUP_TIMEOUT_S", 30.0)
    client = KvStoreClient(address, SHAPE, b"model")
    assert client.wait_until_mapped(5)
    yield client
    client.close()


def numbers(client: KvStoreClient, keys: list[bytes] = KEYS) -> list[float]:
    """The numbers that the found blocks are full of."""
    prefix = client.lookup(SPACE, keys)
    assert all(array.shape == SHAPE.dimensions and array.dtype == np.float32 for array in prefix.blocks)
    found = [float(array.ravel()[0]) for array in prefix.blocks]
    right = prefix.verified(len(found))
    prefix.release()
    return found[:right]


def test_found_blocks_are_copied_out_and_the_lease_is_released(client: KvStoreClient, store: LyingStore) -> None:
    """Blocks 0 and 1 come as arrays of the model's shape; the lease goes back by itself."""
    store.found = [store.slot(0), store.slot(1)]
    assert numbers(client) == [0, 1]
    assert client.flush(5)
    assert [(request.lease_id, list(request.corrupt_keys)) for request in store.released] == [("l1", [])]


def test_a_wrong_checksum_ends_the_run_and_is_reported(client: KvStoreClient, store: LyingStore) -> None:
    """Invariant 11: block 1 does not match, so only block 0 is used, and the store is told which one was wrong."""
    store.found = [store.slot(0), store.slot(1, checksum=1), store.slot(2)]
    assert numbers(client) == [0]
    assert client.flush(5)
    assert [list(request.corrupt_keys) for request in store.released] == [[KEYS[1]]]
    assert client.statistics().corrupt == 1


@pytest.mark.parametrize("wrong", [{"length": 32}, {"offset": 1 << 40}, {"offset": 64 * 3}], ids=str)
def test_a_slot_that_is_not_the_block_asked_for_is_a_miss(
    client: KvStoreClient, store: LyingStore, wrong: dict[str, Any]
) -> None:
    """Another length, a place outside of the arena, another block's place."""
    store.found = [store.slot(0, **wrong)]
    assert numbers(client) == []


def test_a_late_answer_is_a_miss(client: KvStoreClient, store: LyingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes 2 s: the lookup is over before, and it asks no more while the store is given a rest."""
    store.found = [store.slot(0)]
    assert numbers(client) == [0]
    monkeypatch.setattr(kvstore_client, "LOOKUP_TIMEOUT_S", LOOKUP_TIMEOUT_S)
    store.delay_s = 2.0
    begun_s = time.monotonic()
    assert numbers(client) == []
    assert numbers(client) == []
    assert time.monotonic() - begun_s < 2.0  # about 20 ms
    assert (client.statistics().failures, store.acquired) == (1, 2)
    assert LOOKUP_TIMEOUT_S < 0.1


def test_what_is_copied_after_the_lease_has_ended_is_a_miss(
    client: KvStoreClient, store: LyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 11: the request waited longer for its place than its lease lasts. Meanwhile the slot may have held
    another block and, read again from a disk, this one: that the checksum is right by now says nothing of the copy."""
    monkeypatch.setattr(kvstore_client, "READ_LEASE_MS", 1)
    store.found = [store.slot(0)]
    prefix = client.lookup(SPACE, KEYS)
    assert len(prefix.blocks) == 1
    lease_ends_s = time.monotonic() + 0.001
    while time.monotonic() <= lease_ends_s:
        pass
    assert prefix.verified(1) == 0
    prefix.release()
    assert client.flush(5)
    assert [list(request.corrupt_keys) for request in store.released] == [[]]


def test_a_client_without_a_store_misses_and_drops() -> None:
    """Nobody listens: made at once, every lookup a miss, offers dropped, closed at once."""
    client = open_block_store({"kvstore_address": "127.0.0.1:1", "model_digest": "sha256:00"}, SHAPE)
    assert isinstance(client, KvStoreClient)
    assert numbers(client) == []
    client.offer(SPACE, KEYS[:2], [block(0), block(1)])
    assert client.flush(5)
    assert client.statistics().dropped == 2
    client.close()
    client.close()


def test_a_restarted_store_is_mapped_anew(client: KvStoreClient, store: LyingStore, tmp_path: Path) -> None:
    """The reply names another incarnation: that lookup misses, and a later one reads the new arena."""
    store.found = [store.slot(0)]
    assert numbers(client) == [0]
    fresh = tmp_path / "fresh"
    fresh.write_bytes(block(7).tobytes() * 4)
    checksum = xxhash.xxh3_64_intdigest(block(7).tobytes())
    store.found = [store.slot(0, checksum=checksum)]
    store.arena.path, store.arena.incarnation, store.incarnation = str(fresh), "run2", "run2"
    assert numbers(client) == []
    assert client.wait_until_mapped(5)
    assert numbers(client) == [7]


def test_an_arena_of_another_size_is_not_mapped(store: LyingStore, address: str) -> None:
    """A file that is not what the store says cannot be its arena."""
    store.arena.bytes += 4096
    client = KvStoreClient(address, SHAPE, b"model")
    assert not client.wait_until_mapped(0.3)
    assert numbers(client) == []
    client.close()


def test_a_full_queue_drops_offers_without_waiting(
    client: KvStoreClient, store: LyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 100 bytes takes one block of 64 at a time; what does not fit is dropped and counted at once."""
    monkeypatch.setattr("engines.reference.kvstore_client.QUEUE_BYTES_MAX", 100)
    client.offer(SPACE, KEYS[:2], [block(0), block(1)])
    assert client.statistics().dropped == 2
    client.offer(SPACE, KEYS[:1], [block(0)])
    assert client.flush(5)
    assert [list(request.keys) for request in store.reserved] == [KEYS[:1]]


def test_an_offer_names_the_block_above_it(client: KvStoreClient, store: LyingStore) -> None:
    """Of a chain of 4 the last 2 are offered: the second is their parent. A whole chain has none."""
    client.offer(SPACE, KEYS, [block(2), block(3)])
    client.offer(SPACE, KEYS[:1], [block(0)])
    assert client.flush(5)
    tail, whole = store.reserved
    assert (list(tail.keys), tail.parent_key, tail.salt, tail.length) == (KEYS[2:], KEYS[1], SALT, 64)
    assert (list(whole.keys), whole.parent_key) == (KEYS[:1], b"")
    assert tail.client_id.startswith(f"reference-{os.getpid()}-")


def test_the_rest_after_a_failure_is_short() -> None:
    """A store that is back is asked again within half a second."""
    assert COOL_DOWN_S <= 0.5

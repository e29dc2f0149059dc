"""The vLLM connector's connection to the store, against one that is slow or answers nonsense. Needs no vLLM."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engines.vllm import store_link
from engines.vllm.block_saves import SavePlan
from engines.vllm.store_link import StoreLink
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from tests.unit.engines.test_kvstore_client import KEYS, SALT, LyingStore, address, block

__all__ = ["address"]  # a fixture
LIMIT_S = 30.0
PLAN = SavePlan("r1", SALT, b"", (KEYS[0],), (0,))


class SlowStore(LyingStore):
    """Gives a slot for any key, after a while."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.slots: list[kv_pb2.BlockSlot] = []
        self.committed = 0
        self.news = threading.Event()

    def ReserveBlocks(self, request: Any, context: Any) -> kv_pb2.ReserveBlocksReply:
        """The slots that were set; both ways of saying so."""
        time.sleep(self.delay_s)
        offsets = [slot.offset for slot in self.slots]
        reply = kv_pb2.ReserveBlocksReply(lease_id="l1", slots=self.slots, incarnation=self.incarnation)
        if "offsets" in reply.DESCRIPTOR.fields_by_name:
            reply.offsets.extend(offsets)  # type: ignore[attr-defined,unused-ignore]
        return reply

    def CommitBlocks(self, request: Any, context: Any) -> kv_pb2.CommitBlocksReply:
        """Counted."""
        self.committed += 1
        self.news.set()
        return kv_pb2.CommitBlocksReply(committed=1)

    def ReleaseLease(self, request: Any, context: Any) -> kv_pb2.ReleaseLeaseReply:
        """Remembered."""
        reply = super().ReleaseLease(request, context)
        self.news.set()
        return reply


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    """A store with 4 blocks in its arena."""
    return SlowStore(tmp_path / "arena")


@pytest.fixture
def link(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreLink]:
    """A connection, patient for the sake of a busy machine."""
    monkeypatch.setattr(store_link, "LOOKUP_TIMEOUT_S", 30.0)
    link = StoreLink(address)
    yield link
    link.close()


def taken(number: int) -> store_link.Bytes:
    """A block as the connector copies it out."""
    return block(number).reshape(-1).view(np.uint8)


def test_a_slot_whose_lease_ended_before_the_answer_came_is_not_written(
    link: StoreLink, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of 20 ms began when it was granted, and the answer took 200: the slot may be another's by now."""
    monkeypatch.setattr(store_link, "WRITE_LEASE_MS", 20)
    store.slots, store.delay_s = [kv_pb2.BlockSlot(key=KEYS[0], offset=64 * 3, length=64)], 0.2
    link.save(PLAN, [taken(1)], b"model")
    assert store.news.wait(LIMIT_S)
    assert (store.committed, [request.lease_id for request in store.released]) == (0, ["l1"])
    assert Path(store.arena.path).read_bytes()[64 * 3 :] == block(3).tobytes()


def test_an_answer_that_is_nonsense_does_not_end_the_worker(link: StoreLink, store: SlowStore) -> None:
    """Slots that nobody asked for: that save is lost, and the next one is stored."""
    store.slots = [kv_pb2.BlockSlot(key=KEYS[number], offset=0, length=64) for number in (2, 3)]
    link.save(PLAN, [taken(1)], b"model")
    deadline_s = time.monotonic() + LIMIT_S
    while link.failures == 0 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    store.slots = [kv_pb2.BlockSlot(key=KEYS[0], offset=0, length=64)]
    deadline_s = time.monotonic() + LIMIT_S
    while store.committed == 0 and time.monotonic() < deadline_s:
        store.news.clear()
        link.save(PLAN, [taken(1)], b"model")
        store.news.wait(0.1)
    assert store.committed > 0


def test_what_is_copied_after_the_lease_has_ended_is_a_miss(
    link: StoreLink, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 11: the slot may have held another block while it was copied, and this one again by now."""
    store.found = [store.slot(0)]
    run = link.lookup(SALT, KEYS)
    assert link.read(run, 0, lambda _: None)
    monkeypatch.setattr(store_link, "READ_LEASE_MS", 1)
    run = link.lookup(SALT, KEYS)
    time.sleep(0.005)
    assert not link.read(run, 0, lambda _: None)
    assert link.corrupt == 0


def test_an_idle_engine_lets_go_of_the_memory_of_a_store_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next store may need the room, and nobody would ask before it is there."""
    monkeypatch.setattr(store_link, "LOOK_S", 0.05)
    store = SlowStore(tmp_path / "arena")
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        kv_pb2_grpc.add_KvStoreServicer_to_server(store, server)
        link = StoreLink(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        store.found = [store.slot(0)]
        monkeypatch.setattr(store_link, "LOOKUP_TIMEOUT_S", 30.0)
        assert link.read(link.lookup(SALT, KEYS), 0, lambda _: None)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        server.stop(0).wait()
    deadline_s = time.monotonic() + LIMIT_S
    while str(tmp_path) in Path("/proc/self/maps").read_text() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    link.close()

"""The writer of chains: what is reserved is published in order, or given back."""

import math
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash

from engines.block_arena import Bytes, MappedArena
from engines.block_writer import BlockWriter, Chunk, StaleArena, write_in_time
from roundhouse.wire.v1 import kv_pb2

LENGTH, SLOTS = 4096, 12


class ScriptedStore:
    """The stub's three calls over a list of free slots; refuses a block whose parent is not published."""

    def __init__(self) -> None:
        """Everything is free."""
        self.incarnation = "one"
        self.free = list(range(SLOTS))
        self.there: list[bytes] = []
        self.leases: dict[str, list[bytes]] = {}
        self.checksums: dict[bytes, int] = {}
        self.parents: dict[str, bytes] = {}
        self.fail_at = ""

    def ReserveBlocks(self, request: kv_pb2.ReserveBlocksRequest, timeout: float) -> kv_pb2.ReserveBlocksReply:
        """Slots for the keys that are not there, as many as are free."""
        self._maybe_fail("reserve")
        keys = [key for key in request.keys if key not in self.there][: len(self.free)]
        reply = kv_pb2.ReserveBlocksReply(incarnation=self.incarnation)
        if keys:
            reply.lease_id = f"lease{len(self.parents)}"
            self.leases[reply.lease_id], self.parents[reply.lease_id] = keys, request.parent_key
            assert request.packed
            reply.offsets.extend(self.free.pop(0) * LENGTH for _ in keys)
            if keys != list(request.keys)[: len(keys)]:
                reply.numbers.extend(list(request.keys).index(key) for key in keys)
        return reply

    def CommitBlocks(self, request: kv_pb2.CommitBlocksRequest, timeout: float) -> kv_pb2.CommitBlocksReply:
        """Published once, under a parent that is."""
        self._maybe_fail("commit")
        keys, parent = self.leases.pop(request.lease_id, []), self.parents[request.lease_id]
        if parent and parent not in self.there:
            return kv_pb2.CommitBlocksReply(rejected=len(keys))
        self.there += keys
        self.checksums |= dict(zip(keys, request.checksums, strict=True))
        return kv_pb2.CommitBlocksReply(committed=len(keys))

    def _maybe_fail(self, call: str) -> None:
        if self.fail_at == call:
            raise grpc.RpcError


class Bench:
    """A store, an arena, a writer, and the leases that it gave back."""

    def __init__(self, path: Path) -> None:
        """An arena of zeros."""
        path.write_bytes(bytes(LENGTH * SLOTS))
        self.store = ScriptedStore()
        self.arena = MappedArena(kv_pb2.Arena(path=str(path), bytes=LENGTH * SLOTS, incarnation="one"))
        self.given_back: list[str] = []
        self.writer = BlockWriter(self.store, 1.0, lambda release: self.given_back.append(release.lease_id))  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """One of each."""
    made = Bench(tmp_path / "arena")
    yield made
    made.writer.close()


def block(number: int) -> Bytes:
    """Its bytes."""
    return np.random.default_rng(number).integers(0, 256, LENGTH, np.uint8)


def chunks_of(*sizes: int, lease_ms: int = 60_000) -> list[Chunk]:
    """A chain in chunks of so many blocks: keys are numbers."""
    made: list[Chunk] = []
    first = 0
    for size in sizes:
        keys = [bytes([number]) for number in range(first, first + size)]
        parent = bytes([first - 1]) if first else b""
        request = kv_pb2.ReserveBlocksRequest(keys=keys, parent_key=parent, length=LENGTH, lease_ms=lease_ms)
        made.append(Chunk(request, {key: block(key[0]) for key in keys}))
        first += size
    return made


@pytest.mark.parametrize("sizes", [(1,), (12,), (5, 7), (1, 1, 1, 1, 8)])
def test_a_chain_is_published_whole_and_in_order(bench: Bench, sizes: tuple[int, ...]) -> None:
    """In one chunk or many; each block with its own bytes and their checksum."""
    assert bench.writer.store(bench.arena, chunks_of(*sizes)) == sum(sizes)
    assert bench.store.there == [bytes([number]) for number in range(sum(sizes))]
    for number in range(sum(sizes)):
        assert bench.arena.view(number * LENGTH, LENGTH).tobytes() == block(number).tobytes()
        assert bench.store.checksums[bytes([number])] == xxhash.xxh3_64_intdigest(block(number).tobytes())
    assert bench.store.leases == {}
    assert bench.given_back == []


def test_what_is_there_is_not_written_again(bench: Bench) -> None:
    """A chunk that is there whole has no lease, and the next one stands under it: 5 of the 6 were there."""
    bench.writer.store(bench.arena, chunks_of(4, 1))
    assert bench.writer.store(bench.arena, chunks_of(4, 2)) == 1
    assert len(bench.store.there) == 6


def test_of_a_chunk_that_is_there_in_part_the_rest_is_written(bench: Bench) -> None:
    """Two of five blocks are new: each gets its own bytes, the others keep theirs."""
    bench.writer.store(bench.arena, chunks_of(3))
    assert bench.writer.store(bench.arena, chunks_of(5)) == 2
    for number in range(5):
        assert bench.arena.view(number * LENGTH, LENGTH).tobytes() == block(number).tobytes()


def test_without_room_the_rest_is_left_out(bench: Bench) -> None:
    """12 slots, 15 blocks."""
    assert bench.writer.store(bench.arena, chunks_of(8, 7)) == 12
    assert bench.given_back == []


@pytest.mark.parametrize(("call", "leases"), [("reserve", 0), ("commit", 2)])
def test_a_call_that_fails_leaves_no_lease_behind(bench: Bench, call: str, leases: int) -> None:
    """The failure is the caller's; what was reserved by then is given back, also what was reserved ahead."""
    bench.store.fail_at = call
    with pytest.raises(grpc.RpcError):
        bench.writer.store(bench.arena, chunks_of(2, 2))
    assert sorted(bench.given_back) == sorted(bench.store.leases)
    assert len(bench.given_back) == leases


def test_the_arena_of_another_process_is_not_written(bench: Bench) -> None:
    """The store was restarted: nothing is written, and the lease that it gave goes back."""
    bench.store.incarnation = "two"
    with pytest.raises(StaleArena):
        bench.writer.store(bench.arena, chunks_of(2))
    assert not bench.arena.view(0, LENGTH).any()
    assert bench.given_back == list(bench.store.leases)


def test_a_writer_that_is_late_writes_no_further(bench: Bench) -> None:
    """Its lease may have ended, and the slots be another's: a lease of 0 ms is over before the first block."""
    assert bench.writer.store(bench.arena, chunks_of(2, 2, lease_ms=0)) == 0
    assert not bench.arena.view(0, 4 * LENGTH).any()
    assert sorted(bench.given_back) == sorted(bench.store.leases)


@pytest.mark.parametrize(("offsets", "numbers"), [([0, LENGTH], [0, 7]), ([0], [0, 1]), ([0, LENGTH, 2 * LENGTH], [])])
def test_an_answer_for_other_blocks_than_were_asked_for_is_refused(
    bench: Bench, offsets: list[int], numbers: list[int]
) -> None:
    """Of two: one that is not among them, fewer slots than blocks, and one slot too many. Nothing is written."""
    reply = kv_pb2.ReserveBlocksReply(lease_id="lease", incarnation="one", offsets=offsets, numbers=numbers)
    with pytest.raises(ValueError):
        write_in_time(bench.arena, reply, [block(1), block(2)], math.inf)
    assert not bench.arena.view(0, SLOTS * LENGTH).any()


def test_an_answer_that_points_outside_of_the_arena_is_refused(bench: Bench) -> None:
    """Instead of writing there."""
    bench.store.free = [SLOTS]
    with pytest.raises(ValueError):
        bench.writer.store(bench.arena, chunks_of(1))
    assert len(bench.given_back) == 1

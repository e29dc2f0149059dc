"""Clients of the kvstore in processes of their own, for benchmarks. Not a benchmark: it has no `NAME`.

Every round does the same things in the same order in all processes, each of them begun by all at once: plain copies
into and out of shared memory like that of the arena, and then the same bytes through the store. So the ratios of a
round are of one moment of one machine. Between rounds the blocks are erased.
"""

import hashlib
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import grpc
import numpy as np
import redis
import xxhash

from engines.block_arena import Bytes, MappedArena
from engines.block_writer import CHUNK_BLOCKS, BlockWriter, Chunk
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

LEASE_MS = 10_000
TIMEOUT_S = 30.0

Rounds = dict[str, list[float]]
"""GB a second of all clients together, by name, round by round."""
Spans = list[dict[str, tuple[float, float]]]
"""When something began and ended in each round: monotonic seconds, which all processes share."""


def rounds_of(clients: int, nbytes: int, work: Callable[..., None], details: tuple[object, ...]) -> Rounds:
    """Run `work(barrier, queue, name, *details)` in `clients` processes; each puts its spans into the queue."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(clients), context.SimpleQueue()
    processes = [
        context.Process(target=work, args=(barrier, queue, str(number), *details)) for number in range(clients)
    ]
    for process in processes:
        process.start()
    said: list[Spans] = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    results: Rounds = {}
    for spans in zip(*said, strict=True):
        for name in spans[0]:
            took = max(span[name][1] for span in spans) - min(span[name][0] for span in spans)
            results.setdefault(name, []).append(clients * nbytes / took / 1e9)
    return results


def timed(barrier: Barrier, work: Callable[[], None]) -> tuple[float, float]:
    """When `work`, begun by all at once, began and ended."""
    barrier.wait()
    started = time.monotonic()
    work()
    return started, time.monotonic()


@dataclass(frozen=True, slots=True)
class Case:
    """What the clients of one case do: `nbytes` each in a round, in blocks of `size`; `memory`: where arenas lie."""

    address: str
    size: int
    nbytes: int
    rounds: int
    memory: Path


def kvstore_client(barrier: Barrier, queue: object, name: str, case: Case) -> None:
    """Copies without a store, and then the same with it, side by side, so that both meet the same machine."""
    spans: Spans = []
    size, nbytes = case.size, case.nbytes
    with StoreClient(case.address, f"benchmark {name}".encode()) as client, plain_shared(nbytes, case.memory) as shared:
        source, target = touched(nbytes), touched(nbytes)
        for number in range(case.rounds):
            keys, sealed = (
                keys_of(f"{name} {number}", nbytes // size),
                keys_of(f"{name} {number} in place", nbytes // size),
            )
            spans.append(
                {
                    "copy_in": timed(barrier, partial(_copy, shared, source, size)),
                    "checked_copy_in": timed(barrier, partial(_copy, shared, source, size, checked=source)),
                    "put": timed(barrier, partial(client.put, keys, size, source)),
                    "seal": timed(barrier, partial(client.seal, sealed, size)),
                    "copy_out": timed(barrier, partial(_copy, target, shared, size)),
                    "checked_copy_out": timed(barrier, partial(_copy, target, shared, size, checked=shared)),
                    "get": timed(barrier, partial(client.get, keys, target)),
                    "check": timed(barrier, partial(client.check, keys)),
                }
            )
            assert np.array_equal(source, target)
            barrier.wait()
            client.erase()
    queue.put(spans)  # type: ignore[attr-defined]


def redis_client(barrier: Barrier, queue: object, name: str, port: int, size: int, nbytes: int, rounds: int) -> None:
    """SET and GET of the same bytes."""
    client = redis.Redis(port=port)
    value, spans = bytes(size), list[dict[str, tuple[float, float]]]()
    keys = [f"{name}-{number}" for number in range(nbytes // size)]

    def put() -> None:
        for key in keys:
            client.set(key, value)

    def get() -> None:
        for key in keys:
            client.get(key)

    for _ in range(rounds):
        spans.append({"redis_set": timed(barrier, put), "redis_get": timed(barrier, get)})
        barrier.wait()
        client.delete(*keys)
    client.close()
    queue.put(spans)  # type: ignore[attr-defined]


class StoreClient:
    """What an engine does with the store of its node, without an engine. A context manager."""

    def __init__(self, address: str, salt: bytes) -> None:
        """Connects, and maps the arena whole: what is measured is what an engine has after its first seconds."""
        self._salt = salt
        self._channel = grpc.insecure_channel(address)
        self.stub = kv_pb2_grpc.KvStoreStub(self._channel)
        self._arena = MappedArena(self.stub.DescribeArena(kv_pb2.DescribeArenaRequest(), wait_for_ready=True))
        assert self._arena.wait_until_entered(TIMEOUT_S)
        self._writer = BlockWriter(self.stub, TIMEOUT_S, self._give_back)
        self._worker = ThreadPoolExecutor(1)
        self._released: Callable[[], object] | None = None

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._worker.shutdown()
        self._channel.close()

    def put(self, keys: list[bytes], size: int, source: Bytes) -> None:
        """Store `source` as a chain of blocks, as the reference engine's worker does."""
        chunks: list[Chunk] = []
        for first in range(0, len(keys), CHUNK_BLOCKS):
            chunk = keys[first : first + CHUNK_BLOCKS]
            blocks = {key: source[(first + at) * size : (first + at + 1) * size] for at, key in enumerate(chunk)}
            chunks.append(Chunk(self._request(chunk, keys[first - 1] if first else b"", size), blocks))
        assert self._writer.store(self._arena, chunks) == len(keys)

    def seal(self, keys: list[bytes], size: int) -> None:
        """A put by an engine that has computed its blocks in place: hash what lies there."""
        for first in range(0, len(keys), CHUNK_BLOCKS):
            chunk = keys[first : first + CHUNK_BLOCKS]
            slots = self.stub.ReserveBlocks(self._request(chunk, keys[first - 1] if first else b"", size))
            sums = [xxhash.xxh3_64_intdigest(self._arena.view(offset, size).data) for offset in slots.offsets]
            commit = kv_pb2.CommitBlocksRequest(lease_id=slots.lease_id, checksums=sums)
            assert self.stub.CommitBlocks(commit).committed == len(chunk)

    def get(self, keys: list[bytes], target: Bytes, wait_ms: int = 0) -> None:
        """Acquire, copy each block to where it is needed with its checksum, release. An engine asks memory only, and
        waits, in a second call, for what is elsewhere."""
        with self._acquired(keys, wait_ms) as reply:
            into = [target[at : at + reply.length] for at in range(0, len(keys) * reply.length, reply.length)]
            assert self._arena.read(reply.offsets, into, reply.checksums) == len(keys)

    def check(self, keys: list[bytes]) -> None:
        """Acquire, check in place, release: what a get costs beyond the copy that an engine makes into its layout."""
        with self._acquired(keys) as reply:
            assert self._arena.right(reply.offsets, reply.length, reply.checksums) == len(keys)

    def erase(self) -> None:
        """Drop everything that was stored."""
        if self._released is not None:
            self._released()
        assert self.stub.EraseSalt(kv_pb2.EraseSaltRequest(salt=self._salt)).blocks_left == 0

    def _give_back(self, release: kv_pb2.ReleaseLeaseRequest) -> None:
        self.stub.ReleaseLease(release)

    def _request(self, keys: list[bytes], parent: bytes, size: int) -> kv_pb2.ReserveBlocksRequest:
        return kv_pb2.ReserveBlocksRequest(
            salt=self._salt,
            model_digest=b"model",
            keys=keys,
            parent_key=parent,
            length=size,
            client_id="benchmark",
            lease_ms=LEASE_MS,
            packed=True,
        )

    @contextmanager
    def _acquired(self, keys: list[bytes], wait_ms: int = 0) -> Iterator[kv_pb2.AcquirePrefixReply]:
        reply = self.stub.AcquirePrefix(
            kv_pb2.AcquirePrefixRequest(
                salt=self._salt, keys=keys, client_id="benchmark", lease_ms=LEASE_MS, wait_ms=wait_ms, packed=True
            )
        )
        assert len(reply.offsets) == len(keys)
        yield reply
        release = kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id)
        # An engine's worker does that, and nobody waits for it. (`future` would start a thread each: 0.5 ms and more.)
        self._released = self._worker.submit(self.stub.ReleaseLease, release).result


def _copy(target: Bytes, source: Bytes, size: int, checked: Bytes | None = None) -> None:
    for at in range(0, len(source), size):
        if checked is source and checked is not None:
            xxhash.xxh3_64_intdigest(checked[at : at + size].data)
        target[at : at + size] = source[at : at + size]


@contextmanager
def plain_shared(nbytes: int, memory: Path) -> Iterator[Bytes]:
    """Shared memory as the arena is: in huge pages if the file system gives them, touched and mapped."""
    path = memory / f"rh-bench-copy-{os.getpid()}"
    try:
        with path.open("w+b") as file:
            file.truncate(nbytes)
            mapped = mmap.mmap(file.fileno(), nbytes)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        shared = np.frombuffer(mapped, np.uint8)
        shared[:] = 0
        yield shared
    finally:
        path.unlink(missing_ok=True)


def touched(nbytes: int) -> Bytes:
    """Private memory in huge pages, as large buffers of engines are."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    return array


def keys_of(name: str, count: int) -> list[bytes]:
    """Keys of a chain."""
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]

"""Bytes a second into and out of the kvstore, from memory and disk, against plain copies and reads of the same run.

A put reserves, writes into the arena, hashes and commits; a get acquires, copies out, checks and releases: real calls
to a real process, puts in batches of `BATCH` blocks. The limit of memory is the same copies into and out of a mapped,
touched shared file without a store; with several clients every process copies at once, and the time is that from the
first start to the last end. The limit of the disk is direct reads of the same sizes from one file into touched memory
that asks for huge pages. Redis is Valkey over TCP with GET and SET, without its append-only file.
"""

import argparse
import hashlib
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import grpc
import numpy as np
import redis
import xxhash
from numpy.typing import NDArray

from benchmarks.report import Figure, Goal, Report
from deploy.local.ports import free_ports
from deploy.local.server import LocalServer
from deploy.local.stores import valkey_program
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

NAME = "kvstore"
DESCRIPTION = "put and get GB/s from memory and disk, against memory copies and direct reads"

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB)
CLIENTS = (1, 4)
BATCH = 16  # blocks a call, as an engine's chunk
GOALS = {"put": 0.75, "get": 0.9, "disk_get": 0.75}
SALT, LEASE_MS = b"benchmark", 10_000

Rates = dict[str, float]
Spans = dict[str, tuple[float, float]]
"""When something began and ended, monotonic seconds, which all processes share."""


def run(arguments: Sequence[str]) -> Report:
    """Measure every size with every number of clients."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kvstore")
    parser.add_argument("--client-bytes", type=int, default=64 * MIB, help="bytes of one client and turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the median counts")
    parser.add_argument("--folder", type=Path, default=None, help="where the disk to be measured is")
    parser.add_argument("--no-redis", action="store_true", help="leave Valkey out")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="rh-bench-", dir=options.folder) as name:
        for size in SIZES:
            for clients in CLIENTS:
                _case(Path(name), size, clients, options, figures, limits, goals)
    return Report(NAME, figures, limits, goals)


def _case(
    folder: Path,
    size: int,
    clients: int,
    options: argparse.Namespace,
    figures: dict[str, Figure],
    limits: dict[str, Figure],
    goals: list[Goal],
) -> None:
    label = f"{size // KIB}kib_{clients}"
    with ExitStack() as stack:
        address, restart = stack.enter_context(_store(folder, 4 * options.client_bytes * clients))
        ours = _turns(options, clients, _client, (address, size, options.client_bytes))
        plain = _turns(options, clients, _copier, (size, options.client_bytes))
        disk = _disk_rates(address, restart, size, options.client_bytes)
        direct = {"direct_read": _direct_reads(folder / "plain", size, options.client_bytes)}
        for name, rate in (ours | disk).items():
            figures[f"{label}_{name}_gb_per_second"] = rate
        for name, rate in (plain | direct).items():
            limits[f"{label}_{name}_gb_per_second"] = rate
        if not options.no_redis:
            port = stack.enter_context(_valkey(folder))
            for name, rate in _turns(options, clients, _redis_client, (port, size, options.client_bytes)).items():
                figures[f"{label}_{name}_gb_per_second"] = rate
        for name, limit in (("put", plain["copy_in"]), ("get", plain["copy_out"]), ("disk_get", direct["direct_read"])):
            if name in ours | disk:
                goals.append(Goal.at_least(f"{label}: {name} / its limit", GOALS[name], (ours | disk)[name] / limit))


# Clients, each in a process of its own


def _turns(options: argparse.Namespace, clients: int, work: Callable[..., None], details: tuple[object, ...]) -> Rates:
    """GB a second of all clients together, the median of the turns, by name."""
    results: dict[str, list[float]] = {}
    for turn in range(options.repeats):
        context = multiprocessing.get_context("spawn")
        barrier, queue = context.Barrier(clients), context.SimpleQueue()
        processes = [
            context.Process(target=work, args=(barrier, queue, f"{turn}-{number}", *details))
            for number in range(clients)
        ]
        for process in processes:
            process.start()
        said: list[Spans] = [queue.get() for _ in processes]
        for process in processes:
            process.join()
        for name in said[0]:
            took = max(spans[name][1] for spans in said) - min(spans[name][0] for spans in said)
            results.setdefault(name, []).append(clients * options.client_bytes / took / 1e9)
    return {name: statistics.median(rates) for name, rates in results.items()}


def _timed(barrier: Barrier, work: Callable[[], None]) -> tuple[float, float]:
    barrier.wait()
    started = time.monotonic()
    work()
    return started, time.monotonic()


def _client(barrier: Barrier, queue: object, name: str, address: str, size: int, nbytes: int) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        arena = _mapped(stub)
        source, target = _touched(nbytes), _touched(nbytes)
        keys = _keys(name, nbytes // size)
        put = _timed(barrier, lambda: _put(stub, arena, keys, source, size))
        get = _timed(barrier, lambda: _get(stub, arena, keys, target))
        barrier.wait()
        queue.put({"put": put, "get": get})  # type: ignore[attr-defined]


def _put(
    stub: kv_pb2_grpc.KvStoreStub, arena: NDArray[np.uint8], keys: list[bytes], source: NDArray[np.uint8], size: int
) -> None:
    for first in range(0, len(keys), BATCH):
        reserved = stub.ReserveBlocks(
            kv_pb2.ReserveBlocksRequest(
                salt=SALT,
                model_digest=b"model",
                keys=keys[first : first + BATCH],
                parent_key=keys[first - 1] if first else b"",
                length=size,
                client_id="benchmark",
                lease_ms=LEASE_MS,
            )
        )
        for number, slot in enumerate(reserved.slots, first):
            block = source[number * size : (number + 1) * size]
            arena[slot.offset : slot.offset + size] = block
            slot.checksum = xxhash.xxh3_64_intdigest(block.data)
        done = stub.CommitBlocks(kv_pb2.CommitBlocksRequest(lease_id=reserved.lease_id, blocks=reserved.slots))
        assert done.committed == len(keys[first : first + BATCH])


def _get(stub: kv_pb2_grpc.KvStoreStub, arena: NDArray[np.uint8], keys: list[bytes], target: NDArray[np.uint8]) -> None:
    reply = stub.AcquirePrefix(
        kv_pb2.AcquirePrefixRequest(salt=SALT, keys=keys, client_id="benchmark", lease_ms=LEASE_MS, wait_ms=10_000)
    )
    assert len(reply.blocks) == len(keys)
    at = 0
    for slot in reply.blocks:
        into = target[at : at + slot.length]
        into[:] = arena[slot.offset : slot.offset + slot.length]
        assert xxhash.xxh3_64_intdigest(into.data) == slot.checksum
        at += slot.length
    stub.ReleaseLease(kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id))


def _copier(barrier: Barrier, queue: object, name: str, size: int, nbytes: int) -> None:
    path = Path(f"/dev/shm/rh-bench-copy-{os.getpid()}")  # noqa: S108 - the same memory as the arena's
    try:
        with path.open("w+b") as file:
            file.truncate(nbytes)
            shared = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        shared[:] = 0
        source, target = _touched(nbytes), _touched(nbytes)

        def copy_in() -> None:
            for at in range(0, nbytes, size):
                shared[at : at + size] = source[at : at + size]

        def copy_out() -> None:
            for at in range(0, nbytes, size):
                target[at : at + size] = shared[at : at + size]

        rates = {"copy_in": _timed(barrier, copy_in), "copy_out": _timed(barrier, copy_out)}
        barrier.wait()
        queue.put(rates)  # type: ignore[attr-defined]
    finally:
        path.unlink(missing_ok=True)


def _redis_client(barrier: Barrier, queue: object, name: str, port: int, size: int, nbytes: int) -> None:
    client = redis.Redis(port=port)
    value, keys = bytes(size), [f"{name}-{number}" for number in range(nbytes // size)]

    def put() -> None:
        for key in keys:
            client.set(key, value)

    def get() -> None:
        for key in keys:
            client.get(key)

    rates = {"redis_set": _timed(barrier, put), "redis_get": _timed(barrier, get)}
    client.delete(*keys)
    client.close()
    queue.put(rates)  # type: ignore[attr-defined]


# The disk


def _disk_rates(address: str, restart: Callable[[], None], size: int, nbytes: int) -> Rates:
    """A get of blocks that are on disk only: stored, used, written, and the process started again."""
    keys, target = _keys("disk", nbytes // size), _touched(nbytes)
    with grpc.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        arena = _mapped(stub)
        _put(stub, arena, keys, _touched(nbytes), size)
        _get(stub, arena, keys, target)
        _wait_until_written(stub)
    restart()
    with grpc.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        arena = _mapped(stub)
        started = time.perf_counter()
        _get(stub, arena, keys, target)
        return {"disk_get": nbytes / (time.perf_counter() - started) / 1e9}


def _wait_until_written(stub: kv_pb2_grpc.KvStoreStub) -> None:
    """Until the disk has not grown for a second: the blocks of the memory turns are written too, and first."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        now = stub.GetStatistics(kv_pb2.GetStatisticsRequest(salt=SALT)).disk.blocks
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.05)


def _direct_reads(path: Path, size: int, nbytes: int) -> float:
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:] = os.urandom(MIB) * (nbytes // MIB)
    path.write_bytes(view)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.fsync(descriptor)
        started = time.perf_counter()
        for at in range(0, nbytes, size):
            os.preadv(descriptor, [view[at : at + size]], at)
        return nbytes / (time.perf_counter() - started) / 1e9
    finally:
        os.close(descriptor)
        path.unlink()


# Parts


@contextmanager
def _store(folder: Path, arena_bytes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A kvstore process with a disk; its address, and how to kill and start it again."""
    grpc_port, ops_port = free_ports(2)
    with tempfile.TemporaryDirectory(dir=folder) as data, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        environment = os.environ | {
            "ROUNDHOUSE_NODE_ID": "benchmark",
            "ROUNDHOUSE_NATS_URL": "nats://127.0.0.1:1",
            "ROUNDHOUSE_GRPC_PORT": str(grpc_port),
            "ROUNDHOUSE_OPS_PORT": str(ops_port),
            "ROUNDHOUSE_ARENA_PATH": f"{memory}/arena",
            "ROUNDHOUSE_ARENA_BYTES": str(arena_bytes),
            "ROUNDHOUSE_DATA_DIR": data,
            "ROUNDHOUSE_DISK_BYTES": str(max(2 * arena_bytes, 256 * MIB)),
        }
        processes: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            command = [sys.executable, "-m", "services.kvstore"]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                stub = kv_pb2_grpc.KvStoreStub(channel)
                stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=30, wait_for_ready=True)

        def restart() -> None:
            processes[-1].kill()
            processes[-1].wait()
            start()

        start()
        try:
            yield f"127.0.0.1:{grpc_port}", restart
        finally:
            processes[-1].kill()
            processes[-1].wait()


@contextmanager
def _valkey(folder: Path) -> Iterator[int]:
    (port,) = free_ports(1)
    server = LocalServer(valkey_program("valkey", port, folder / "valkey", folder / "valkey.log"))
    server.start()
    try:
        with redis.Redis(port=port) as client:
            client.config_set("appendonly", "no")  # a cache, as ours is
        yield port
    finally:
        server.stop()


def _mapped(stub: kv_pb2_grpc.KvStoreStub) -> NDArray[np.uint8]:
    """The arena, its pages entered into this process's tables."""
    arena = stub.DescribeArena(kv_pb2.DescribeArenaRequest(), wait_for_ready=True)
    with Path(arena.path).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), arena.bytes)
    mapped.madvise(23)  # MADV_POPULATE_WRITE, as the engine's client does
    return np.frombuffer(mapped, np.uint8)


def _touched(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)


def _keys(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]

"""Bytes a second into and out of the kvstore, from memory and disk, against plain copies and reads of the same run.

A put reserves, hashes, writes into the arena and commits, in batches of `BATCH` blocks; a get acquires, copies each
block to where it is needed, checks it and releases; a check does so without the copy, which an engine makes anyway when
it fills its own pool, and a seal is a put by an engine that has computed its blocks in place. All are real calls to a
real process. The limit of memory is the same copies into and out of a mapped, touched shared file, made by the same
process between them, and, as the limit of whoever looks at every byte, the same copies with a checksum each; with
several clients every process copies at once, and the time is that from the first start to the last end. The limit of
the disk is direct reads of the same sizes from one file into touched memory that asks for huge pages, one beside each
get. Redis is Valkey over TCP with GET and SET, without its append-only file; `--lmcache-python` and `--mooncake-python`
name interpreters that have these stores.
"""

import argparse
import hashlib
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np
import redis
import xxhash
from numpy.typing import NDArray

from benchmarks.kv_first_token import first_token_figures
from benchmarks.kv_lookups import lookup_figures
from benchmarks.kv_process import kvstore_running
from benchmarks.kv_rivals import NAMES, run_rival
from benchmarks.report import Figure, Goal, Report
from deploy.local.ports import free_ports
from deploy.local.server import LocalServer
from deploy.local.stores import valkey_program
from engines.block_arena import MappedArena
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

NAME = "kvstore"
DESCRIPTION = "put and get GB/s from memory and disk, against memory copies and direct reads"

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB)
CLIENTS = (1, 4)
BATCH = 64  # blocks a call, as the reference engine's chunk
GOALS = {"put": 0.75, "get": 0.9, "check": 0.9, "disk_get": 0.75}
SALT, LEASE_MS = b"benchmark", 10_000

Bytes = NDArray[np.uint8]
Rates = dict[str, float]
Spans = dict[str, tuple[float, float]]
"""When something began and ended, monotonic seconds, which all processes share."""


class Reserving(Protocol):
    """A reservation under way."""

    def result(self) -> kv_pb2.ReserveBlocksReply:
        """Wait for it."""
        ...


def run(arguments: Sequence[str]) -> Report:
    """Measure every size with every number of clients."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kvstore")
    parser.add_argument("--client-bytes", type=int, default=64 * MIB, help="bytes of one client and turn: one prompt")
    for rival in NAMES:
        parser.add_argument(f"--{rival}-python", type=Path, default=None, help=f"an interpreter that has {rival}")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the median counts")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="of a block, bytes")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), help="processes at once")
    parser.add_argument("--folder", type=Path, default=None, help="where the disk to be measured is")
    parser.add_argument("--no-redis", action="store_true", help="leave Valkey out")
    parser.add_argument("--parts", nargs="+", choices=["throughput", "lookups", "first-token"], help="default: all")
    parser.add_argument(
        "--lookup-blocks", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="blocks in the store"
    )
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    goals: list[Goal] = []
    parts = options.parts or ["throughput", "lookups", "first-token"]
    with tempfile.TemporaryDirectory(prefix="rh-bench-", dir=options.folder) as name:
        if "lookups" in parts:
            figures |= lookup_figures(Path(name), options.lookup_blocks)
        if "first-token" in parts:
            figures |= first_token_figures(Path(name))
        if "throughput" not in parts:
            return Report(NAME, figures, limits, goals)
        for size in options.sizes:
            for clients in options.clients:
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
        address, restart = stack.enter_context(
            kvstore_running(folder, (2 * options.repeats + 1) * options.client_bytes * max(clients, 2))
        )
        rates = _turns(options, clients, _client, (address, size, options.client_bytes))
        plain = {name: rates.pop(name) for name in ("copy_in", "copy_out", "checked_copy_in", "checked_copy_out")}
        ours = rates
        disk, direct = _disk_rates(address, restart, size, options, folder)
        for name, rate in (ours | disk).items():
            figures[f"{label}_{name}_gb_per_second"] = rate
        for name, rate in (plain | direct).items():
            limits[f"{label}_{name}_gb_per_second"] = rate
        if not options.no_redis:
            port = stack.enter_context(_valkey(folder))
            for name, rate in _turns(options, clients, _redis_client, (port, size, options.client_bytes)).items():
                figures[f"{label}_{name}_gb_per_second"] = rate
        if clients == 1:
            _rivals(label, size, options, figures)
        limit_of = {"put": plain["copy_in"], "get": plain["copy_out"], "check": plain["copy_out"]}
        for name, limit in (limit_of | {"disk_get": direct["direct_read"]}).items():
            goals.append(Goal.at_least(f"{label}: {name} / its limit", GOALS[name], (ours | disk)[name] / limit))


def _rivals(label: str, size: int, options: argparse.Namespace, figures: dict[str, Figure]) -> None:
    for name in NAMES:
        python: Path | None = getattr(options, f"{name}_python")
        if python is None:
            continue
        first, second = free_ports(2)
        rates = run_rival(python, name, size, options.client_bytes, options.repeats, (first, second))
        if isinstance(rates, str):
            figures[f"{label}_{name}_skipped"] = rates
            continue
        figures |= {f"{label}_{name}_{what}_gb_per_second": rate for what, rate in rates.items()}


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
    """Copies without a store, and then the same with it, side by side, so that both meet the same machine."""
    with grpc.insecure_channel(address) as channel, _plain_shared(nbytes) as shared:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        arena = _mapped(stub)
        source, target = _touched(nbytes), _touched(nbytes)
        keys, sealed = _keys(name, nbytes // size), _keys(f"{name} sealed", nbytes // size)
        spans = {
            "copy_in": _timed(barrier, lambda: _copy(shared, source, size)),
            "checked_copy_in": _timed(barrier, lambda: _copy(shared, source, size, checked=source)),
            "put": _timed(barrier, lambda: _put(stub, arena, keys, size, source)),
            "seal": _timed(barrier, lambda: _put(stub, arena, sealed, size)),
            "copy_out": _timed(barrier, lambda: _copy(target, shared, size)),
            "checked_copy_out": _timed(barrier, lambda: _copy(target, shared, size, checked=shared)),
            "get": _timed(barrier, lambda: _get(stub, arena, keys, target)),
            "check": _timed(barrier, lambda: _check(stub, arena, keys)),
        }
        barrier.wait()
        queue.put(spans)  # type: ignore[attr-defined]


def _put(
    stub: kv_pb2_grpc.KvStoreStub, arena: MappedArena, keys: list[bytes], size: int, source: Bytes | None = None
) -> None:
    """In batches; the next one is reserved, and the last one published, while one is written. Without a source the
    bytes are those that lie there: somebody has computed them in place."""
    batches = [keys[first : first + BATCH] for first in range(0, len(keys), BATCH)]
    reserved = _reserve(stub, batches[0], b"", size)
    published, at = [], 0
    for number, batch in enumerate(batches):
        slots = reserved.result()
        if number + 1 < len(batches):
            reserved = _reserve(stub, batches[number + 1], batch[-1], size)
        for slot in slots.slots:
            if source is None:
                slot.checksum = xxhash.xxh3_64_intdigest(arena.view(slot.offset, size).data)
            else:
                slot.checksum = arena.write(slot.offset, source[at : at + size])
            at += size
        published.append(
            stub.CommitBlocks.future(kv_pb2.CommitBlocksRequest(lease_id=slots.lease_id, blocks=slots.slots))
        )
    assert sum(done.result().committed for done in published) == len(keys)


def _reserve(stub: kv_pb2_grpc.KvStoreStub, keys: list[bytes], parent: bytes, size: int) -> Reserving:
    return stub.ReserveBlocks.future(
        kv_pb2.ReserveBlocksRequest(
            salt=SALT,
            model_digest=b"model",
            keys=keys,
            parent_key=parent,
            length=size,
            client_id="benchmark",
            lease_ms=LEASE_MS,
        )
    )


def _get(stub: kv_pb2_grpc.KvStoreStub, arena: MappedArena, keys: list[bytes], target: Bytes) -> None:
    """Acquire, copy each block to where it is needed, check it, release: all that an engine does."""
    with _acquired(stub, keys) as reply:
        for number, (offset, checksum) in enumerate(zip(reply.offsets, reply.checksums, strict=True)):
            into = target[number * reply.length : (number + 1) * reply.length]
            assert arena.read(offset, into, checksum)


def _copy(target: Bytes, source: Bytes, size: int, checked: Bytes | None = None) -> None:
    for at in range(0, len(source), size):
        if checked is source and checked is not None:
            xxhash.xxh3_64_intdigest(checked[at : at + size].data)
        target[at : at + size] = source[at : at + size]


@contextmanager
def _plain_shared(nbytes: int) -> Iterator[Bytes]:
    """Shared memory in huge pages, touched, as the arena is."""
    path = Path(f"/dev/shm/rh-bench-copy-{os.getpid()}")  # noqa: S108 - the same memory as the arena's
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


def _check(stub: kv_pb2_grpc.KvStoreStub, arena: MappedArena, keys: list[bytes]) -> None:
    """Acquire, check in place, release: what a get costs beyond the copy that the engine makes anyway."""
    with _acquired(stub, keys) as reply:
        for offset, checksum in zip(reply.offsets, reply.checksums, strict=True):
            assert arena.is_right(offset, reply.length, checksum)


@contextmanager
def _acquired(stub: kv_pb2_grpc.KvStoreStub, keys: list[bytes]) -> Iterator[kv_pb2.AcquirePrefixReply]:
    reply = stub.AcquirePrefix(
        kv_pb2.AcquirePrefixRequest(
            salt=SALT, keys=keys, client_id="benchmark", lease_ms=LEASE_MS, wait_ms=10_000, packed=True
        )
    )
    assert len(reply.offsets) == len(keys)
    yield reply
    stub.ReleaseLease.future(
        kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id)
    )  # nobody waits for it, as in an engine


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


def _disk_rates(
    address: str, restart: Callable[[], None], size: int, options: argparse.Namespace, folder: Path
) -> tuple[Rates, Rates]:
    """A get of blocks that are on disk only: stored, used, written, and the process started again; and plain reads.

    Each turn asks one of as many chains as there are turns, with the direct reads of another file beside it."""
    nbytes, gets, reads = options.client_bytes, list[float](), list[float]()
    chains = [_keys(f"disk{turn}", nbytes // size) for turn in range(options.repeats)]
    target = _touched(nbytes)
    with grpc.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        arena = _mapped(stub)
        for keys in chains:
            _put(stub, arena, keys, size, _touched(nbytes))
            _get(stub, arena, keys, target)
        _wait_until_written(stub)
    restart()
    with grpc.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        arena = _mapped(stub)
        for turn, keys in enumerate(chains):
            reads.append(_direct_reads(folder / f"plain{turn}", size, nbytes))
            started = time.perf_counter()
            _get(stub, arena, keys, target)
            gets.append(nbytes / (time.perf_counter() - started) / 1e9)
    return {"disk_get": statistics.median(gets)}, {"direct_read": statistics.median(reads)}


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


def _mapped(stub: kv_pb2_grpc.KvStoreStub) -> MappedArena:
    """The arena, as engines map it."""
    return MappedArena(stub.DescribeArena(kv_pb2.DescribeArenaRequest(), wait_for_ready=True))


def _touched(nbytes: int) -> NDArray[np.uint8]:
    """Private memory in huge pages, as large buffers of engines are."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    return array


def _keys(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]

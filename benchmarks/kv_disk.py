"""Blocks that are on disk only, for benchmarks. Not a benchmark: it has no `NAME`.

Each client asks for chains that were stored, used, written and then lost from memory with the process: a chain a turn.
Beside each turn stand direct reads of a plain file of the same bytes, in pieces of a block, by as many threads as the
store reads with, into memory of the same kind as the arena, touched and mapped (`direct_read`); and by one thread
(`direct_read_1_thread`). The first turn, in which threads start, is not counted.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.kv_clients import Case, Rounds, Spans, StoreClient, keys_of, plain_shared, rounds_of, timed, touched
from engines.block_arena import Bytes
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.kvstore.operations.disk_tier import READ_LANES

DISK_WAIT_MS = 10_000


def turns_of(clients: int) -> int:
    """How many chains each client asks for; all of them fit into memory and onto the disk at once."""
    return 6 if clients == 1 else 4


def disk_rates(case: Case, clients: int, restart: Callable[[], None], folder: Path) -> Rounds:
    """GB a second of all clients together, turn by turn."""
    data = touched(case.nbytes)
    for name in map(str, range(clients)):
        with StoreClient(case.address, _salt(name)) as client:
            for turn in range(turns_of(clients)):
                client.put(_keys(name, turn, case), case.size, data)
                client.get(_keys(name, turn, case), data)
                _plain(folder, name, turn).write_bytes(data.tobytes())
            _wait_until_written(client.stub)
    restart()
    rates = rounds_of(clients, case.nbytes, _disk_client, (case, turns_of(clients), folder))
    for name in map(str, range(clients)):
        for turn in range(turns_of(clients)):
            _plain(folder, name, turn).unlink()
    return rates


def _disk_client(barrier: Barrier, queue: object, name: str, case: Case, turns: int, folder: Path) -> None:
    spans: Spans = []
    with (
        StoreClient(case.address, _salt(name)) as client,
        plain_shared(case.nbytes, case.memory) as shared,
        ThreadPoolExecutor(READ_LANES) as threads,
    ):
        target = touched(case.nbytes)
        for turn in range(turns):
            descriptor = os.open(_plain(folder, name, turn), os.O_RDONLY | os.O_DIRECT)
            os.fsync(descriptor)
            keys, plain = _keys(name, turn, case), partial(_direct_reads, threads, descriptor, shared, case.size)
            spans.append(
                {
                    "direct_read_1_thread": timed(barrier, partial(plain, 1)),
                    "direct_read": timed(barrier, partial(plain, READ_LANES)),
                    "disk_get": timed(barrier, partial(client.get, keys, target, DISK_WAIT_MS)),
                }
            )
            os.close(descriptor)
    queue.put(spans[1:])  # type: ignore[attr-defined]


def _direct_reads(threads: ThreadPoolExecutor, descriptor: int, into: Bytes, size: int, lanes: int) -> None:
    view = into.data

    def read(first: int) -> None:
        for at in range(first * size, len(view), lanes * size):
            os.preadv(descriptor, [view[at : at + size]], at)

    list(threads.map(read, range(lanes)))


def _wait_until_written(stub: kv_pb2_grpc.KvStoreStub) -> None:
    """Until the disk has not grown for a second."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        now = stub.GetStatistics(kv_pb2.GetStatisticsRequest()).disk.blocks
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.05)  # between two looks at another process


def _salt(name: str) -> bytes:
    return f"benchmark disk {name}".encode()


def _keys(name: str, turn: int, case: Case) -> list[bytes]:
    return keys_of(f"disk {name} {turn}", case.nbytes // case.size)


def _plain(folder: Path, name: str, turn: int) -> Path:
    return folder / f"plain-{name}-{turn}"

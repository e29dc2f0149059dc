"""Lookups a second of prefixes of 1,000 blocks, against how many blocks the kvstore has. Not a benchmark: no `NAME`.

Real calls to a real process by one client, one after the other: acquire, and the release that follows in its own time.
Prefixes are asked for in random order. Blocks are of 64 bytes: their bytes are never touched.
"""

import hashlib
import random
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from benchmarks.kv_process import kvstore_running
from benchmarks.report import Figure
from roundhouse.block_keys import prefix_block_keys
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

PREFIX, LENGTH, SALT = 1_000, 64, b"benchmark"
SECONDS = 3.0


def lookup_figures(folder: Path, sizes: Sequence[int]) -> dict[str, Figure]:
    """Lookups a second at each number of blocks, the milliseconds of one, and those of the keys of such a prefix."""
    figures: dict[str, Figure] = {"keys_of_1000_blocks_ms": min(_keys_ms() for _ in range(5))}
    for blocks in sizes:
        arena = max(1 << 20, -(-2 * blocks * LENGTH // 4096) * 4096)
        with kvstore_running(folder, arena, LENGTH) as (address, _), grpc.insecure_channel(address) as channel:
            stub = kv_pb2_grpc.KvStoreStub(channel)
            prefixes = [_stored(stub, number) for number in range(blocks // PREFIX)]
            rate = _rate(stub, prefixes)
        figures[f"lookups_per_second_of_{blocks}_blocks"] = rate
        figures[f"lookup_ms_of_{blocks}_blocks"] = 1_000 / rate
    return figures


def _keys_ms() -> float:
    """The gateway and the engine key prompts where they also do everything else."""
    started = time.perf_counter()
    assert len(prefix_block_keys(SALT, b"m", b"", 16, range(16 * PREFIX))) == PREFIX
    return (time.perf_counter() - started) * 1_000


def _stored(stub: kv_pb2_grpc.KvStoreStub, number: int) -> list[bytes]:
    keys = [hashlib.sha256(f"{number}/{block}".encode()).digest() for block in range(PREFIX)]
    reserved = stub.ReserveBlocks(
        kv_pb2.ReserveBlocksRequest(
            salt=SALT, model_digest=b"m", keys=keys, length=LENGTH, client_id="benchmark", lease_ms=10_000
        )
    )
    for slot in reserved.slots:
        slot.checksum = 1
    done = stub.CommitBlocks(kv_pb2.CommitBlocksRequest(lease_id=reserved.lease_id, blocks=reserved.slots))
    assert done.committed == PREFIX
    return keys


def _rate(stub: kv_pb2_grpc.KvStoreStub, prefixes: Sequence[list[bytes]]) -> float:
    chance, done, started = random.Random(1), 0, time.perf_counter()
    releases = []
    while time.perf_counter() - started < SECONDS:
        reply = stub.AcquirePrefix(
            kv_pb2.AcquirePrefixRequest(
                salt=SALT, keys=chance.choice(prefixes), client_id="benchmark", lease_ms=10_000, packed=True
            )
        )
        assert len(reply.offsets) == PREFIX
        releases.append(stub.ReleaseLease.future(kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id)))
        done += 1
    for release in releases:
        release.result()
    return done / (time.perf_counter() - started)

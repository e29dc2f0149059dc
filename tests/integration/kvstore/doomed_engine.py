"""An engine that is killed in the middle: leases a prefix, reserves and half-writes blocks, says so, and hangs.

Run as a program by `test_two_clients.py`: address, salt, keys to lease, keys to reserve (comma-separated hexadecimal).
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import grpc

from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

LEASE_MS = 1_500


def main(address: str, salt: str, leased: str, reserved: str) -> None:
    """Take, half-write, report, wait to be killed."""
    stub = kv_pb2_grpc.KvStoreStub(grpc.insecure_channel(address))
    arena = stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=60)
    lease = kv_pb2.AcquirePrefixRequest(
        salt=bytes.fromhex(salt), keys=from_hex(leased), client_id="doomed", lease_ms=LEASE_MS
    )
    reservation = kv_pb2.ReserveBlocksRequest(
        salt=bytes.fromhex(salt), keys=from_hex(reserved), length=4096, client_id="doomed", lease_ms=LEASE_MS
    )
    prefix = stub.AcquirePrefix(lease, timeout=60)
    slots = stub.ReserveBlocks(reservation, timeout=60).slots
    with Path(arena.path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[slots[0].offset : slots[0].offset + 2048] = b"h" * 2048
        sys.stdout.write(f"{len(prefix.blocks)} {len(slots)}\n")
        sys.stdout.flush()
        time.sleep(60)


def from_hex(text: str) -> list[bytes]:
    """Keys from their hexadecimal list."""
    return [bytes.fromhex(part) for part in text.split(",")]


if __name__ == "__main__":
    main(*sys.argv[1:])

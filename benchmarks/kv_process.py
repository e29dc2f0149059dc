"""A kvstore process for benchmarks. Not a benchmark: it has no `NAME`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from deploy.local.ports import free_ports
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - in pages of 4 KiB on most machines


@contextmanager
def kvstore_running(
    folder: Path, arena_bytes: int, slot_bytes: int = 4096, memory_folder: Path = SHARED_MEMORY
) -> Iterator[tuple[str, Callable[[], None]]]:
    """A kvstore process with a disk; its address, and how to kill and start it again."""
    grpc_port, ops_port = free_ports(2)
    with tempfile.TemporaryDirectory(dir=folder) as data, tempfile.TemporaryDirectory(dir=memory_folder) as memory:
        environment = os.environ | {
            "ROUNDHOUSE_NODE_ID": "benchmark",
            "ROUNDHOUSE_NATS_URL": "nats://127.0.0.1:1",
            "ROUNDHOUSE_GRPC_PORT": str(grpc_port),
            "ROUNDHOUSE_OPS_PORT": str(ops_port),
            "ROUNDHOUSE_ARENA_PATH": f"{memory}/arena",
            "ROUNDHOUSE_ARENA_BYTES": str(arena_bytes),
            "ROUNDHOUSE_SLOT_BYTES": str(slot_bytes),
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

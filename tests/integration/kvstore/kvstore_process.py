"""One real kvstore process for tests, and a plain client of its own to look at it."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc

from deploy.local.ports import free_ports
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc, loading_pb2

READY_S = 60.0  # a process takes 2 s to start, and ten times as long on a busy machine
NO_NATS = "nats://127.0.0.1:1"


class KvStoreProcess:
    """A kvstore on fixed ports and a fixed arena path, to be killed and restarted."""

    def __init__(
        self,
        folder: Path,
        *,
        arena_bytes: int = 4 << 20,
        slot_bytes: int = 4096,
        nats_url: str = NO_NATS,
        data_dir: Path | str = "",
        node_id: str = "node-1",
        disk_key_file: Path | str = "",
        file_bytes_max: int = 0,
        peer_transport: str = "grpc",
    ):
        self.node_id = node_id
        self._file_bytes_max = file_bytes_max
        self.grpc_port, self.ops_port = free_ports(2)
        self.address = f"127.0.0.1:{self.grpc_port}"
        self.arena_path = folder / "arena"
        self._log = folder / "kvstore.log"
        self._environment = {
            **os.environ,
            "ROUNDHOUSE_NODE_ID": node_id,
            "ROUNDHOUSE_NATS_URL": nats_url,
            "ROUNDHOUSE_GRPC_PORT": str(self.grpc_port),
            "ROUNDHOUSE_OPS_PORT": str(self.ops_port),
            "ROUNDHOUSE_ARENA_PATH": str(self.arena_path),
            "ROUNDHOUSE_ARENA_BYTES": str(arena_bytes),
            "ROUNDHOUSE_SLOT_BYTES": str(slot_bytes),
            "ROUNDHOUSE_DATA_DIR": str(data_dir),
            "ROUNDHOUSE_DISK_KEY_FILE": str(disk_key_file),
            "ROUNDHOUSE_PEER_TRANSPORT": peer_transport,
            "ROUNDHOUSE_DISK_BYTES": str(128 << 20),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = grpc.insecure_channel(
            self.address, options=[("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
        )
        self.stub = kv_pb2_grpc.KvStoreStub(self._channel)

    def start(self) -> None:
        """Start and wait until it answers; a process that does not is ended."""
        self._spawn()
        try:
            self._wait_until_ready(time.monotonic() + READY_S)
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self, until_s: float) -> None:
        while True:
            try:
                self.stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=READY_S, wait_for_ready=True)
            except grpc.RpcError:  # a stream of the process before it, that was killed
                if time.monotonic() > until_s:
                    raise
            else:
                return

    def run_to_the_end(self) -> int:
        """Start and wait until it ends by itself; the exit code."""
        self._spawn()
        assert self._process is not None
        return self._process.wait(READY_S)

    def _spawn(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.kvstore"], env=self._environment, stdout=log, stderr=log
            )
        if self._file_bytes_max:  # before it has written anything: it is still importing
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (self._file_bytes_max, self._file_bytes_max))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does not wait."""
        assert self._process is not None
        self._process.send_signal(number)

    def state(self) -> loading_pb2.NodeState:
        """What the loader of this node would say of it."""
        return loading_pb2.NodeState(node_id=self.node_id, kvstore_address=self.address)

    def kill(self) -> None:
        """SIGKILL, as in a crash. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(READY_S)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(READY_S)

    def close(self) -> None:
        """Nothing is left."""
        self.kill()
        self._channel.close()

    def statistics(self) -> kv_pb2.Statistics:
        """Counts now."""
        return self.stub.GetStatistics(kv_pb2.GetStatisticsRequest(), timeout=READY_S)

    def flip_byte(self, offset: int) -> None:
        """What a broken memory bar does."""
        with self.arena_path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            arena[offset] ^= 0xFF

    def invert_arena(self) -> None:
        """Every byte is wrong."""
        with self.arena_path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            arena[:] = bytes(arena).translate(bytes(range(255, -1, -1)))

    def ops(self, path: str) -> tuple[int, str]:
        """Status and body of an ops page."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}{path}", timeout=READY_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def conditions(self) -> dict[str, str]:
        """The conditions of readiness."""
        conditions: dict[str, str] = json.loads(self.ops("/health/ready")[1])["conditions"]
        return conditions

    def segments(self) -> list[Path]:
        """The files of its blocks on disk."""
        return sorted(Path(self._environment["ROUNDHOUSE_DATA_DIR"]).glob("*.segment"))

    def log_text(self) -> str:
        """All it said."""
        return self._log.read_text()


def eventually(holds: object, within_s: float = READY_S) -> None:
    """Ask again until `holds()` is true; AssertionError when the time is over."""
    assert callable(holds)
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.02)

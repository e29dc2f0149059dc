"""Several gateway processes behind one port."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from deploy.local.ports import free_ports, is_free
from deploy.local.probes import listening_probe
from tests.infra import wait_until

LONG_S = 60


def answers(port: int, path: str = "/health/live") -> str | None:
    """None when the port answers."""
    try:
        httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=30)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None


def child_pids(parent: int) -> set[int]:
    """Its children."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == parent and stat[0] != "Z":
                found.add(int(folder.name))
    return found


def test_workers_share_ports_are_restarted_and_drain(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """Two workers: each has an ops port, both serve the HTTP port; a killed one comes back; SIGTERM ends all with 0."""
    http, grpc, admin, http2, ops = free_ports(5)
    while not is_free(ops + 1):
        (ops,) = free_ports(1)
    settings = {
        "WORKERS": 2,
        "NATS_URL": nats_url,
        "REDIS_URL": redis_url,
        "INSTANCE_ID": "g",
        "HTTP_PORT": http,
        "GRPC_PORT": grpc,
        "ADMIN_PORT": admin,
        "HTTP2_PORT": http2,
        "OPS_PORT": ops,
        "DRAIN_SECONDS": 2,
        "OUTBOX_DIR": tmp_path / "outbox",
        "LOG_LEVEL": "warning",
    }
    environment = {**os.environ, **{f"ROUNDHOUSE_{name}": str(value) for name, value in settings.items()}}
    parent = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=environment)
    try:
        wait_until(lambda: listening_probe(http2), within_s=LONG_S)
        for port in (ops, ops + 1, http):
            wait_until(lambda port=port: answers(port), within_s=LONG_S)  # type: ignore[misc]
        workers = child_pids(parent.pid)
        assert len(workers) == 2
        os.kill(min(workers), signal.SIGKILL)
        wait_until(lambda: None if len(child_pids(parent.pid) - workers) == 1 else "not yet", within_s=LONG_S)
        for port in (ops, ops + 1, http):
            wait_until(lambda port=port: answers(port), within_s=LONG_S)  # type: ignore[misc]
        parent.terminate()
        assert parent.wait(LONG_S) == 0
        assert answers(http) is not None
    finally:
        parent.kill()
        parent.wait(LONG_S)

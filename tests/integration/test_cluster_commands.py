"""`roundhouse up`, `status`, `down` as a person uses them, and what they say when something is in the way."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.local.child import group_members, process_start_ticks
from deploy.local.home import ClusterState, Home
from tests.e2e.catalogue import write_catalogue

pytestmark = pytest.mark.timeout(240)

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0", "--device-bytes", "100MiB")


def roundhouse(*arguments: str, home: Path, within_s: float = 120) -> "subprocess.CompletedProcess[str]":
    """Run one command to its end."""
    environment = {**os.environ, "ROUNDHOUSE_HOME": str(home)}
    argv = [sys.executable, "-m", "roundhouse.cli.app", *arguments]
    return subprocess.run(argv, env=environment, check=False, capture_output=True, text=True, timeout=within_s)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end-to-end tests' catalogue."""
    return write_catalogue(tmp_path_factory.mktemp("models"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder for one cluster, which is stopped at the end whatever happens."""
    yield tmp_path / "home"
    roundhouse("down", home=tmp_path / "home")


def up(home: Path, catalogue: Path) -> ClusterState:
    """Start a detached cluster and return what it says of itself."""
    done = roundhouse("up", "--detach", *ANY_PORTS, "--catalogue", str(catalogue), home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    state = Home(home).read_state()
    assert state is not None
    return state


def test_up_chat_usage_down_leaves_nothing(home: Path, catalogue: Path) -> None:
    """Detached start; a streamed chat; its tokens on the bill; after `down` no process and no shared memory is left."""
    state = up(home, catalogue)
    secrets = json.loads((home / "secrets.json").read_text())
    tokens = stream_chat(state, secrets["tenant_keys"]["acme"])
    assert tokens == 8
    assert billed_output_tokens(state, secrets["admin_key"]) == tokens
    status = roundhouse("status", home=home)
    assert status.returncode == 0, status.stdout
    assert re.search(r"node-1|node-2", status.stdout)
    assert "tiny-1" in status.stdout

    again = roundhouse("up", *ANY_PORTS, home=home)
    assert again.returncode == 1
    assert f"already running at http://127.0.0.1:{state.http_port}" in again.stderr

    down = roundhouse("down", home=home)
    assert (down.returncode, down.stdout) == (0, "stopped\n")
    assert process_start_ticks(state.pid) is None
    assert [part.name for part in state.parts if group_members(part.pid)] == []
    assert shared_memory(home) == []
    assert roundhouse("status", home=home).returncode == 3


def test_a_killed_cluster_takes_its_parts_along_and_the_next_start_cleans_up(home: Path, catalogue: Path) -> None:
    """SIGKILL of `up` itself: every part dies at once, and the same folder starts again with its keys and its data."""
    before = up(home, catalogue)
    keys = (home / "secrets.json").read_text()
    os.kill(before.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(group_members(part.pid) for part in before.parts) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [part.name for part in before.parts if group_members(part.pid)] == []
    after = up(home, catalogue)
    assert after.pid != before.pid
    assert (home / "secrets.json").read_text() == keys, "the first keys still work and are kept"
    assert stream_chat(after, json.loads(keys)["tenant_keys"]["acme"]) == 8


def test_a_taken_port_is_named_with_its_option_before_anything_starts(home: Path) -> None:
    """Exit code 1, the port, the option; no part was started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = roundhouse("up", *ANY_PORTS[2:], "--http-port", str(port), home=home)
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr
    assert "--http-port" in done.stderr
    assert not list((home / "logs").glob("nats*"))


def test_a_broken_catalogue_ends_the_start_with_its_place(home: Path, tmp_path: Path) -> None:
    """The file's problem is told with its line, everything is stopped, exit code 1 (case B44)."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("version: 1\ntenants:\n- name: acme\n  wieght: 2\n")
    done = roundhouse("up", "--detach", *ANY_PORTS, "--catalogue", str(broken), home=home)
    assert done.returncode == 1
    assert "broken.yaml:4" in done.stdout + done.stderr
    assert not Home(home).is_locked()
    assert shared_memory(home) == []


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Children take SIGINT, as from a terminal: what a shell runs in the background inherits that it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_it_starts_ends_everything(home: Path, catalogue: Path, presses: int) -> None:
    """Once drains, twice kills; either way exit code 0 and nothing is left, although the start was not finished."""
    argv = [sys.executable, "-m", "roundhouse.cli.app", "up", *ANY_PORTS, "--catalogue", str(catalogue)]
    environment = {**os.environ, "ROUNDHOUSE_HOME": str(home)}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        parts = started_parts(home)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        page, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert page.endswith("stopped\n")
    assert [pid for pid in parts if group_members(pid)] == []
    assert shared_memory(home) == []


def started_parts(home: Path) -> list[int]:
    """Pids once the services are starting."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = Home(home).read_state()
        if state is not None and len(state.parts) > 6:
            return [part.pid for part in state.parts]
        time.sleep(0.05)
    raise TimeoutError("no part was started")


def stream_chat(state: ClusterState, key: str) -> int:
    """Stream 8 tokens from a cold or warm model; completion tokens as the API said."""
    body = {
        "model": "tiny-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 8,
        "logit_bias": {"1": -100},  # the end token: the answer must have its full length
        "messages": [{"role": "user", "content": "hello"}],
    }
    url = f"http://127.0.0.1:{state.http_port}/v1/chat/completions"
    usage = None
    with httpx.stream("POST", url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    assert usage is not None
    return int(usage["completion_tokens"])


def billed_output_tokens(state: ClusterState, admin_key: str) -> int:
    """Output tokens of acme in the ledger, once there are any."""
    url = f"http://127.0.0.1:{state.admin_port}/admin/v1/usage"
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        answer = httpx.get(
            url, params={"tenant": "acme", "group_by": "tenant"}, headers={"Authorization": f"Bearer {admin_key}"}
        )
        if answer.json()["rows"]:
            return int(answer.json()["rows"][0]["output_tokens"])
        time.sleep(0.1)
    return 0


def shared_memory(home: Path) -> list[str]:
    """What the cluster has in /dev/shm."""
    return [entry.name for entry in Path("/dev/shm").glob(f"{Home(home).shared_memory_prefix}*")]  # noqa: S108

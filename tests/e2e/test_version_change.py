"""A model gets a new version under steady calls: nobody notices the good one, and nobody the bad one (case B19)."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.local.parts import ClusterOptions
from tests.builders.checkpoints import knob_model
from tests.e2e.calls import ledger_rows, nothing, opened, streamed
from tests.e2e.mesh import Mesh, mesh_running

pytestmark = pytest.mark.timeout(300)

MODEL_BYTES = 20 * 2**20
SLOTS, CALLERS = 2, 6  # so that requests wait for the old version when it leaves
WITHIN_S = 90  # on a busy machine; it takes two


def declare(root: Path, folder: Path) -> Path:
    """A catalogue with one model, whose version is what lies in `folder`."""
    model = {
        "name": "m",
        "source": {"path": str(folder)},
        "engine": "triton",
        "interface": "llm",
        "context_tokens": 2048,
        "tokenizer": str(folder),
        "memory": {"device": MODEL_BYTES, "kv_pool_tokens": 4096},
        "slots": SLOTS,
    }
    tenant = {"name": "acme", "limits": {"requests_per_minute": 100_000, "tokens_per_minute": 100_000_000}}
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tenants": [tenant], "models": [model]}, sort_keys=False))
    return path


@pytest.fixture(scope="module", params=[100, 30], ids=["beside", "in its place"])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One node, with room for both versions or for one."""
    root = tmp_path_factory.mktemp("versions")
    catalogue = declare(root, knob_model(root / "v1", tokens=200, token_interval_ms=5))
    options = ClusterOptions(
        nodes=1, device_bytes=request.param * 2**20, host_bytes=16 * 2**20, http_port=0, grpc_port=0, admin_port=0
    )
    with mesh_running(root / "home", options, catalogue) as running:
        yield running


class Callers:
    """Six clients that ask again and again, three times what an instance runs at once; what they got."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask_forever) for _ in range(CALLERS)]
        self.statuses: list[int] = []

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self.statuses) + count
        until = time.monotonic() + WITHIN_S
        while len(self.statuses) < wanted and time.monotonic() < until:
            time.sleep(0.05)
        assert len(self.statuses) >= wanted, "answers keep coming"

    def _ask_forever(self) -> None:
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"Authorization": f"Bearer {self._mesh.keys['acme']}"}
        with httpx.Client(timeout=120, headers=headers) as client:
            while not self._ended.is_set():
                answer = client.post(f"{self._mesh.http_url}/v1/chat/completions", json=body)
                self.statuses.append(answer.status_code)


def test_a_bad_version_is_not_noticed_and_a_good_one_takes_over(
    mesh: Mesh, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """0 failed calls of 200 after either version. A stream begun on version 1 ends on version 1 with all of its tokens,
    also when version 2 takes its place; afterwards the node has version 2, and the bill of a new call names it. (The
    bad version is published only where there is room for both: in the old one's place it costs one gap, which
    tests/unit/loader has.)"""
    streamed(mesh, "m", max_tokens=4, act=nothing)
    with Callers(mesh) as callers:
        callers.more(20)
        if "beside" in request.node.name:
            apply(mesh, declare(tmp_path, knob_model(tmp_path / "bad", fail_load="the weights are cut off")))
            wait_for(mesh, lambda states: "failed" in states.values() and "ready" in states.values())
            callers.more(200)
        with opened(mesh, "m", max_tokens=200) as (stream, events):
            next(events)
            good = knob_model(tmp_path / "good", tokens=300, token_interval_ms=1)
            apply(mesh, declare(tmp_path, good))
            for _ in events:
                pass
        assert (stream.errors, stream.completion_tokens, stream.done) == ([], 200, True)
        digest = declared_digest(mesh)
        wait_for(mesh, lambda states: states.get(digest) == "ready")
        callers.more(200)
    assert set(callers.statuses) == {200}
    since_ms = int(time.time() * 1000) - 1_000
    last = streamed(mesh, "m", max_tokens=8, act=nothing)
    assert (last.completion_tokens, last.errors) == (8, [])
    row = ledger_rows(mesh, "acme", {last.request_id}, within_s=30, since_ms=since_ms)[last.request_id]
    assert row["model_digest"] == digest


def apply(mesh: Mesh, catalogue: Path) -> None:
    """Make it the catalogue."""
    body = {"text": catalogue.read_text(), "base_dir": str(catalogue.parent)}
    answer = httpx.post(f"{mesh.admin_url}/admin/v1/catalogue", json=body, headers=admin(mesh), timeout=60)
    assert answer.status_code == 200, answer.text


def declared_digest(mesh: Mesh) -> str:
    """The version that the catalogue names."""
    answer = httpx.get(f"{mesh.admin_url}/admin/v1/catalogue", headers=admin(mesh), timeout=60)
    return str(answer.json()["models"]["m"]["digest"])


def wait_for(mesh: Mesh, holds: object) -> None:
    """Wait until the node's instances (digest → state) are as wished."""
    assert callable(holds)
    until = time.monotonic() + WITHIN_S
    states: dict[str, str] = {}
    while time.monotonic() < until:
        answer = httpx.get(f"{mesh.admin_url}/admin/v1/nodes", headers=admin(mesh), timeout=60)
        states = {
            instance["digest"]: instance["state"] for node in answer.json()["nodes"] for instance in node["instances"]
        }
        if holds(states):
            return
        time.sleep(0.1)
    raise AssertionError(f"the node has {states}")


def admin(mesh: Mesh) -> dict[str, str]:
    """The operator's headers."""
    return {"Authorization": f"Bearer {mesh.admin_key}"}

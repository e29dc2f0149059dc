"""A model that an operator pins never leaves for another, whatever is asked for; afterwards it may."""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import yaml

from deploy.local.parts import ClusterOptions
from tests.builders.checkpoints import knob_model
from tests.e2e.calls import nothing, streamed
from tests.e2e.mesh import Mesh, mesh_running

pytestmark = pytest.mark.timeout(300)

MODEL_BYTES = 20 * 2**20
WITHIN_S = 60


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One node with room for two of four models."""
    root = tmp_path_factory.mktemp("pins")
    models = [
        {
            "name": name,
            "source": {"path": str(knob_model(root / name, tokens=4))},
            "engine": "triton",
            "interface": "llm",
            "context_tokens": 2048,
            "tokenizer": str(root / name),
            "memory": {"device": MODEL_BYTES, "kv_pool_tokens": 4096},
        }
        for name in ("kept", "one", "two", "three")
    ]
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tenants": [{"name": "acme"}], "models": models}, sort_keys=False))
    options = ClusterOptions(
        nodes=1, device_bytes=2 * MODEL_BYTES + 1, host_bytes=16 * 2**20, http_port=0, grpc_port=0, admin_port=0
    )
    with mesh_running(root / "home", options, path) as running:
        yield running


def post(mesh: Mesh, path: str, **body: object) -> None:
    """One call of the admin API."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    answer = httpx.post(f"{mesh.admin_url}/admin/v1{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def states(mesh: Mesh) -> dict[str, str]:
    """Model → state on the node."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    nodes = httpx.get(f"{mesh.admin_url}/admin/v1/nodes", headers=headers, timeout=60).json()["nodes"]
    return {each["model"]: each["state"] for node in nodes for each in node["instances"]}


def wait_until_state(mesh: Mesh, model: str, *wanted: str) -> None:
    """Wait until the node says so."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        if states(mesh).get(model, "registered") in wanted:
            return
        time.sleep(0.05)
    raise AssertionError(f"{model} is not {wanted}: {states(mesh)}")


class Watch:
    """Everything that the node said of one model meanwhile."""

    def __init__(self, mesh: Mesh, model: str) -> None:
        self.seen: set[str] = set()
        self._mesh = mesh
        self._model = model
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.seen.add(states(self._mesh).get(self._model, "registered"))


def test_a_pinned_model_stays(mesh: Mesh) -> None:
    """Pinned without a request, it is loaded. Three others then share the one place beside it, all are served, and it
    is ready throughout. Unpinned, it is the one that nobody has asked for: it leaves."""
    post(mesh, "/models/kept/pin", min_replicas=1)
    wait_until_state(mesh, "kept", "ready")
    with Watch(mesh, "kept") as watch:
        for name in ("one", "two", "three", "one"):
            answer = streamed(mesh, name, max_tokens=4, act=nothing)
            assert (answer.completion_tokens, answer.errors) == (4, [])
    assert watch.seen == {"ready"}
    post(mesh, "/models/kept/unpin")
    for _ in range(4):
        for name in ("two", "three"):
            answer = streamed(mesh, name, max_tokens=4, act=nothing)
            assert (answer.completion_tokens, answer.errors) == (4, [])
        if states(mesh).get("kept") != "ready":
            return
    raise AssertionError("it may leave, and others are worth more")

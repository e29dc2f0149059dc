"""Streams that go on elsewhere: over the death of their node, and from the node of prompts to the one that decodes."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deploy.local.parts import ClusterOptions, Profile
from tests.e2e.calls import admin_get, ledger_rows, nothing, opened, streamed
from tests.e2e.catalogue import NODE_BYTES, write_catalogue
from tests.e2e.mesh import Mesh, mesh_running
from tests.infra import wait_until

pytestmark = pytest.mark.timeout(300)

SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]
TOKENS = 400  # half a second of a tiny model and more: its node is killed in the middle


def told(mesh: Mesh, model: str, act: Callable[[], None] = nothing, **body: Any) -> Any:
    """One streamed answer; `act` is called at its third event."""
    return streamed(mesh, model, max_tokens=TOKENS, act=act, body={"ignore_eos": True, **body})


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_stream_outlives_the_death_of_its_node(mesh: Mesh, sampling: dict[str, Any]) -> None:
    """Case B29 for an engine that names its tokens: SIGKILL of its Triton in mid-stream; the text is that of an
    undisturbed run, the usage is that of one request, and the bill has each token once, in two attempts."""
    whole = told(mesh, "tiny-1", **sampling)
    assert (whole.done, whole.completion_tokens) == (True, TOKENS)
    node = str(ledger_rows(mesh, "acme", {whole.request_id})[whole.request_id]["node"])
    cut = told(mesh, "tiny-1", lambda: mesh.crash(node.replace("node", "triton")), **sampling)
    mesh.wait_ready()
    assert (cut.errors, cut.done, cut.finish_reasons) == ([], True, ["length"])
    assert cut.text == whole.text
    assert cut.completion_tokens == TOKENS
    rows = attempts(mesh, cut.request_id)
    assert [row["outcome"] for row in rows] == ["failed", "done"]
    assert sum(row["output_tokens"] for row in rows) == TOKENS
    assert sum(row["input_tokens"] for row in rows) == attempts(mesh, whole.request_id)[0]["input_tokens"]


def attempts(mesh: Mesh, request_id: str) -> list[dict[str, Any]]:
    """The ledger's rows of one request, by attempt, once its last attempt is there."""
    deadline, rows = time.monotonic() + 30, list[dict[str, Any]]()
    while time.monotonic() < deadline:
        found = admin_get(mesh, "/usage", tenant="acme", group_by="request", limit="500")["rows"]
        rows = sorted((row for row in found if row["request_id"] == request_id), key=lambda row: row["attempt"])
        if rows and rows[-1]["outcome"] == "done":
            return rows
        time.sleep(0.2)
    raise TimeoutError(f"the ledger has {rows}")


def holders(mesh: Mesh, model: str) -> set[str]:
    """Nodes that have a model ready."""
    return {
        node["node_id"]
        for node in admin_get(mesh, "/nodes")["nodes"]
        for each in node["instances"]
        if (each["model"], each["state"]) == (model, "ready")
    }


def metric(mesh: Mesh, part: str, name: str) -> float:
    """A series without labels of a part."""
    page = httpx.get(f"{mesh.ops_url(part)}/metrics").text
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh of a node for prompts and a node that decodes."""
    root = tmp_path_factory.mktemp("split")
    options = ClusterOptions(
        nodes=2,
        device_bytes=NODE_BYTES,
        arena_bytes=16 * 2**20,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        cluster="split",
        drain_seconds=3,
        profile=Profile.DISAGGREGATED,
    )
    with mesh_running(root / "home", options, write_catalogue(root)) as running:
        yield running


def test_a_long_prompt_runs_on_one_node_and_decodes_on_the_other(mesh: Mesh, split: Mesh) -> None:
    """While a stream decodes, a long prompt is handed over: the text is that of a node that does it all, the usage is
    that of one request, the decode node's kvstore fetched blocks, and nothing is held at the end."""
    prompt = {"messages": [{"role": "user", "content": "tell me about the railways of the world " * 10}]}
    alone = streamed(mesh, "tiny-2", max_tokens=40, act=nothing, body={"ignore_eos": True, "temperature": 0, **prompt})
    streamed(split, "tiny-2", max_tokens=4, act=nothing)
    wait_until(lambda: None if holders(split, "tiny-2") == {"node-1", "node-2"} else "not on both nodes", within_s=30)
    with opened(split, "tiny-2", max_tokens=TOKENS, body={"ignore_eos": True}) as (running, events):
        next(events)
        handed = streamed(
            split, "tiny-2", max_tokens=40, act=nothing, body={"ignore_eos": True, "temperature": 0, **prompt}
        )
        for _ in events:
            pass
    assert (running.done, handed.done, handed.errors) == (True, True, [])
    assert handed.text == alone.text
    assert handed.completion_tokens == 40
    [row] = attempts(split, handed.request_id)
    assert (row["outcome"], row["output_tokens"], row["node"]) == ("done", 40, "node-2")
    assert metric(split, "kvstore-2", "roundhouse_kv_peer_fetched_total") > 0
    assert metric(split, "kvstore-1", "roundhouse_kv_holds") == 0

"""Streams that go on elsewhere: over the death of their node, and from the node of prompts to the one that decodes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
import yaml

from deploy.local.parts import ClusterOptions, Profile
from tests.builders.checkpoints import random_checkpoint
from tests.e2e.calls import admin_get, ledger_rows, nothing, opened, streamed
from tests.e2e.catalogue import MODEL_BYTES, NODE_BYTES, PRICE
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
    for _ in range(5):  # on a busy machine the third event may be read when the last token has been made
        cut = told(mesh, "tiny-1", partial(mesh.crash, node.replace("node", "triton")), **sampling)
        mesh.wait_ready()
        if len(attempts(mesh, cut.request_id)) > 1:
            break
        node = str(ledger_rows(mesh, "acme", {cut.request_id})[cut.request_id]["node"])
    assert (cut.errors, cut.done, cut.finish_reasons) == ([], True, ["length"])
    assert cut.text == whole.text
    assert cut.completion_tokens == TOKENS
    rows = attempts(mesh, cut.request_id)
    assert [row["outcome"] for row in rows] == ["failed", "done"]
    assert sum(row["output_tokens"] for row in rows) == TOKENS
    assert sum(row["input_tokens"] for row in rows) == attempts(mesh, whole.request_id)[0]["input_tokens"]


def test_a_stream_leaves_a_node_that_is_emptied(mesh: Mesh) -> None:
    """Maintenance of the node in mid-stream: the stream goes on elsewhere with the same text; the node gets empty."""
    body = {"ignore_eos": True, "temperature": 0}
    whole = streamed(mesh, "tiny-4", max_tokens=TOKENS, act=nothing, body=body)
    node = str(ledger_rows(mesh, "acme", {whole.request_id})[whole.request_id]["node"])
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    path = f"{mesh.admin_url}/admin/v1/nodes/{node}"

    def drain() -> None:
        assert httpx.post(f"{path}/drain", json={"reason": "test"}, headers=headers, timeout=30).is_success

    try:
        moved = streamed(mesh, "tiny-4", max_tokens=TOKENS, act=drain, body=body)
        assert (moved.errors, moved.done, moved.completion_tokens) == ([], True, TOKENS)
        assert moved.text == whole.text
        wait_until(lambda: "it still has models" if "tiny-4" in models_on(mesh, node) else None, within_s=60)
    finally:
        httpx.post(f"{path}/resume", json={}, headers=headers, timeout=30)
    mesh.wait_ready(60)


def models_on(mesh: Mesh, node: str) -> set[str]:
    """Models that hold device memory of a node."""
    return {
        each["model"]
        for found in admin_get(mesh, "/nodes")["nodes"]
        if found["node_id"] == node
        for each in found["instances"]
        if each["state"] not in ("staged", "failed")
    }


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
    """A mesh of a node for prompts and a node that decodes, with a model whose prompts take a while."""
    root = tmp_path_factory.mktemp("split")
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 8, "kv_heads": 4}
    model = {
        "name": "thinker",
        "source": {"path": str(random_checkpoint(root / "thinker", 5, context_tokens=1024, **shape))},
        "engine": "reference",
        "interface": "llm",
        "memory": {"device": MODEL_BYTES, "kv_pool_tokens": 4096},
        "price": PRICE,
    }
    catalogue = root / "catalogue.yaml"
    catalogue.write_text(yaml.safe_dump({"version": 1, "tenants": [{"name": "acme"}], "models": [model]}))
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
    with mesh_running(root / "home", options, catalogue) as running:
        yield running


def test_a_long_prompt_runs_on_one_node_and_decodes_on_the_other(split: Mesh) -> None:
    """Alone a long prompt stays on the decode node; beside three streams another is handed over. Its usage is that of
    one request, decode fetched its blocks, the hold on them ends, and the text is that of a run in one place."""
    streamed(split, "thinker", max_tokens=40, act=nothing, body=_long("railways"))
    wait_until(lambda: None if holders(split, "thinker") == {"node-1", "node-2"} else "not on both nodes", within_s=30)
    assert metric(split, "kvstore-2", "roundhouse_kv_peer_fetched_total") == 0
    for number in range(10):  # on a busy machine the three may have ended before the long prompt is placed
        body = _long(f"stations {number}")
        with ExitStack() as stack:
            running = [
                stack.enter_context(opened(split, "thinker", max_tokens=800, body={"ignore_eos": True}))
                for _ in range(3)
            ]
            for _, events in running:
                next(events)
            handed = streamed(split, "thinker", max_tokens=40, act=nothing, body=body)
            assert [sum(1 for _ in events) > 0 and stream.done for stream, events in running] == [True] * 3
        assert (handed.done, handed.errors, handed.completion_tokens) == (True, [], 40)
        if metric(split, "kvstore-2", "roundhouse_kv_peer_fetched_total") > 0:
            break
    else:
        raise AssertionError("no prompt was handed over")
    [row] = attempts(split, handed.request_id)
    assert (row["outcome"], row["output_tokens"], row["node"]) == ("done", 40, "node-2")
    wait_until(lambda: "blocks are held" if metric(split, "kvstore-1", "roundhouse_kv_holds") else None, within_s=30)
    assert streamed(split, "thinker", max_tokens=40, act=nothing, body=body).text == handed.text


def _long(what: str) -> dict[str, Any]:
    content = f"the {what} of the world " * 25
    return {"ignore_eos": True, "temperature": 0, "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("part", ["triton-1", "kvstore-1", "triton-2", "kvstore-2"])
def test_whichever_part_of_a_hand_over_is_killed_the_text_is_the_same(split: Mesh, part: str) -> None:
    """A prompt that is handed over beside three streams: engine or blocks of either node are killed 50 ms after it was
    sent, wherever it is then. It is run again within its attempts; text and bill are those of one request."""
    streamed(split, "thinker", max_tokens=1, act=nothing, body=_long("warm"))
    wait_until(lambda: None if holders(split, "thinker") == {"node-1", "node-2"} else "not on both nodes", within_s=60)
    body = _long(f"signals of {part}")
    with ExitStack() as stack:
        running = [
            stack.enter_context(opened(split, "thinker", max_tokens=600, body={"ignore_eos": True})) for _ in range(3)
        ]
        for _, events in running:
            next(events)
        timer = threading.Timer(0.05, split.crash, (part,))
        timer.start()
        cut = streamed(split, "thinker", max_tokens=40, act=nothing, body=body)
        timer.join()
        assert [(sum(1 for _ in events) > 0, stream.errors, stream.broken) for stream, events in running] == [
            (True, [], "")
        ] * 3, split.log("gateway")[-4_000:]
    split.wait_ready(60)
    assert (cut.done, cut.errors, cut.completion_tokens) == (True, [], 40)
    rows = attempts(split, cut.request_id)
    assert sum(row["output_tokens"] for row in rows) == 40
    assert sum(1 for row in rows if row["input_tokens"]) == 1
    assert streamed(split, "thinker", max_tokens=40, act=nothing, body=body).text == cut.text
    for node in ("kvstore-1", "kvstore-2"):
        wait_until(partial(_held_at, split, node), within_s=30)


def _held_at(mesh: Mesh, kvstore: str) -> str | None:
    return "blocks are held" if metric(mesh, kvstore, "roundhouse_kv_holds") else None

"""The reference engine on a real Triton: streams, cancellation, neighbours, adapters, embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.packaging import EngineSpec
from tests.builders.checkpoints import random_adapter, random_checkpoint, scripted_checkpoint
from tests.integration.engines.engine_server import Answer, EngineServer
from tests.unit.engines.engine_driver import open_model, run_one

SLOTS = 4
POOL_TOKENS = 16_384  # room for four requests of 4,000 tokens and a small one
BYTE_TEXT = "ď🌍你"


@dataclass(frozen=True)
class Served:
    """The module's server and what it has loaded: `random` and `script`."""

    engines: EngineServer
    folder: Path

    def ask(self, prompt: str, model: str = "random", **arguments: Any) -> Answer:
        """A whole call, greedy unless told otherwise."""
        return self.engines.ask(model, prompt, **{"temperature": 0, **arguments})


@pytest.fixture(scope="module")
def served(engines: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two models on one server."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 128, "intermediate_size": 320, "layers": 3, "context_tokens": 4096}
    checkpoints = {"random": random_checkpoint(folder / "random", 1, dtype="float16", **shape)}
    checkpoints["script"] = scripted_checkpoint(folder / "script", BYTE_TEXT)
    specs = {
        name: EngineSpec("reference", name, str(path), slots=SLOTS, kv_pool_tokens=POOL_TOKENS)
        for name, path in checkpoints.items()
    }
    for spec in specs.values():
        engines.load(spec)
    yield Served(engines, folder)
    for name in specs:
        engines.unload(name)


def test_a_stream_and_a_single_answer_agree(served: Served) -> None:
    """Same text and counts; a stream has several responses, a single answer one. And it is what the engine computes."""
    streamed, single = (served.ask("Hello world", stream=stream, max_tokens=50) for stream in (True, False))
    assert (streamed.error, single.error) == (None, None)
    assert (
        streamed.text == single.text == run_one(open_model(served.folder / "random"), "Hello world", max_tokens=50).text
    )
    assert streamed.output_tokens == single.output_tokens == 50
    assert len(streamed.responses) > 1
    assert len(single.responses) == 1
    assert [r["finish_reason"] for r in streamed.responses] == ["null"] * (len(streamed.responses) - 1) + ["length"]
    assert single.last["num_input_tokens"] == len("Hello world")
    for response in (streamed.responses[0], streamed.last, single.last):
        assert set(json.loads(response["roundhouse"])) == {"cached_tokens", "queue_ms", "prefill_ms", "decode_ms"}


@pytest.mark.parametrize(
    ("params", "text", "tokens", "finish"),
    [
        ({}, BYTE_TEXT, 10, "stop"),
        ({"stop": ["你"]}, "ď🌍", 9, "stop"),
        ({"max_tokens": 4}, "ď\ufffd", 4, "length"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_characters_split_over_tokens(
    served: Served, stream: bool, params: dict[str, Any], text: str, tokens: int, finish: str
) -> None:
    """Case B31: one byte a token; with a stop string; cut inside a character. Both modes say the same."""
    answer = served.ask("any prompt", "script", stream=stream, **{"max_tokens": 20, **params})
    assert (answer.text, answer.output_tokens, answer.last["finish_reason"]) == (text, tokens, finish)


def test_token_ids_replace_the_text(served: Served) -> None:
    """`prompt_token_ids` replaces the tokenized text: the byte tokens of "Hi" are 5 + their bytes."""
    by_ids = served.ask("ignored", details={"prompt_token_ids": [5 + byte for byte in b"Hi"]}, max_tokens=5)
    assert by_ids.last["num_input_tokens"] == 2
    assert by_ids.text == served.ask("Hi", max_tokens=5).text


def test_concurrent_requests_get_what_they_get_alone(served: Served) -> None:
    """Twelve at once on four slots, greedy and sampled: each equals its own run by itself."""
    calls: list[dict[str, Any]] = [
        {
            "prompt": f"prompt {i} " * (i + 1),
            "max_tokens": 20 + i,
            "temperature": i % 3 / 2,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(12)
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        together = list(pool.map(lambda call: served.ask(**call), calls))
    alone = [served.ask(**call) for call in calls]
    assert [a.text for a in together] == [a.text for a in alone]
    assert [a.output_tokens for a in together] == [call["max_tokens"] for call in calls]


def test_a_cancelled_stream_frees_its_slot_at_once(served: Served) -> None:
    """Four endless streams fill the slots; when one is cancelled, a waiting request runs long before the others end."""
    endless = [
        served.engines.open("random", "x", temperature=0, max_tokens=4000, ignore_eos=True) for _ in range(SLOTS)
    ]
    try:
        for stream in endless:
            assert isinstance(stream.next(), dict)
        endless[0].cancel()
        assert served.ask("x", max_tokens=1).output_tokens == 1
        assert isinstance(endless[1].next(), dict), "the neighbours go on"
    finally:
        for stream in endless:
            stream.cancel()
    assert served.ask("x", max_tokens=1).output_tokens == 1, "all slots are free again"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"logit_bias": {"99999999": 5}}, "invalid_request: logit_bias:"),
        ({"logit_bias": {"AI": -100}}, "invalid_request: logit_bias:"),
        ({"logit_bias": {"5": 1000}}, "invalid_request: logit_bias:"),
        ({"temperature": -1}, "invalid_request: temperature:"),
        ({"top_p": 2}, "invalid_request: top_p:"),
        ({"n": 0}, "invalid_request: n:"),
        ({"max_tokens": 5000}, "context_length_exceeded:"),
        ({"details": {"adapter": {"path": "/nowhere", "digest": ""}}}, "invalid_request: adapter:"),
    ],
)
def test_a_bad_parameter_hurts_nobody_else(served: Served, params: dict[str, Any], error: str) -> None:
    """Case B41: the error names the parameter; the stream that runs meanwhile, and a request after, are as ever."""
    neighbour = served.engines.open("random", "neighbour", temperature=0, max_tokens=100)
    first = neighbour.next()
    refused = served.ask("x", **params)
    assert (refused.error or "").startswith(error)
    assert not refused.responses
    tokens = first["num_output_tokens"] if isinstance(first, dict) else 0
    while isinstance(item := neighbour.next(), dict):
        tokens += item["num_output_tokens"]
        if item["_final"]:
            break
    neighbour.close()
    assert tokens == 100
    assert served.ask("x", max_tokens=3).output_tokens == 3


def test_adapters_answer_each_for_themselves(served: Served) -> None:
    """Base and two adapters at once give three answers; a broken adapter fails its own request."""
    base = served.folder / "random"
    adapters = [
        {"adapter": {"path": str(random_adapter(served.folder / f"a{s}", base, s)), "digest": ""}} for s in (1, 2)
    ]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda d: served.ask("same prompt", details=d, max_tokens=16), [None, *adapters]))
    assert [answer.error for answer in answers] == [None] * 3
    assert len({answer.text for answer in answers}) == 3
    (served.folder / "a1" / "adapter_config.json").write_text("{}")
    broken = {"adapter": {"path": str(served.folder / "a1"), "digest": "new"}}
    assert "r must be in" in (served.ask("same prompt", details=broken).error or "")


def test_embeddings(served: Served) -> None:
    """One response with a vector of length 1 and no tokens."""
    answer = served.ask("embed this", details={"phase": "embed"}, stream=False)
    assert answer.last["embedding"].shape == (128,)
    assert np.linalg.norm(answer.last["embedding"]) == pytest.approx(1.0)
    assert (answer.last["num_output_tokens"], answer.last["num_input_tokens"]) == (0, len("embed this"))


def test_log_probabilities_come_token_by_token(served: Served) -> None:
    """As many entries as tokens, the greedy token first among the top, bytes exact."""
    answer = served.ask("x", max_tokens=10, logprobs=2, skip_special_tokens=False)
    entries = [entry for response in answer.responses for entry in json.loads(response["logprobs"])]
    assert len(entries) == 10
    assert all(entry["top"][0]["id"] == entry["id"] and len(entry["top"]) == 2 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == answer.text


def test_a_broken_checkpoint_fails_its_load_with_the_reason(served: Served) -> None:
    """The error names the file; the server and its other models are as ever."""
    folder = random_checkpoint(served.folder / "broken")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(Exception, match=r"model\.safetensors: not a safetensors file"):
        served.engines.load(EngineSpec("reference", "broken", str(folder)))
    assert served.ask("x", max_tokens=2).output_tokens == 2

"""ONNX graphs and native models on a real Triton."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from engines.onnx.intent import __path__ as intent_path
from engines.packaging import EngineSpec
from tests.builders.checkpoints import knob_model, turn_knobs
from tests.integration.engines.engine_server import EngineServer

INTENT = Path(next(iter(intent_path))) / "intent.onnx"


def classify(
    engines: EngineServer, features: np.ndarray[tuple[int, int], np.dtype[np.float32]]
) -> tuple[list[int], list[float]]:
    """Labels and sums of probabilities."""
    tensor = triton_grpc.InferInput("features", list(features.shape), "FP32")
    tensor.set_data_from_numpy(features)
    result = engines.client.infer("intent", [tensor], client_timeout=10)
    return result.as_numpy("label").tolist(), result.as_numpy("probabilities").sum(axis=1).tolist()


def test_a_classifier_answers_batches_of_any_size(engines: EngineServer) -> None:
    """A batch of three has the labels of its rows alone; a wrong width is refused and the next call works."""
    engines.load(EngineSpec("onnx", "intent", str(INTENT)))
    features = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    labels, sums = classify(engines, features)
    assert labels == [classify(engines, row[None])[0][0] for row in features]
    assert sums == pytest.approx([1.0] * 3)
    with pytest.raises(triton_grpc.InferenceServerException):
        classify(engines, np.zeros((1, 15), np.float32))
    assert classify(engines, features)[0] == labels
    engines.unload("intent")


def test_a_native_model_answers_as_its_knobs_say(engines: EngineServer, tmp_path: Path) -> None:
    """Tokens, max_tokens, one response after a time; knobs turned between loads take effect."""
    folder = knob_model(tmp_path / "knob", tokens=3)
    engines.load(EngineSpec("triton", "knob", str(folder)))
    answer = engines.ask("knob", "four")
    assert (answer.text, answer.output_tokens, answer.last["finish_reason"]) == ("tok0 tok1 tok2", 3, "stop")
    assert answer.last["num_input_tokens"] == 4
    assert engines.ask("knob", "x", max_tokens=2).last["finish_reason"] == "length"
    assert len(engines.ask("knob", "x", stream=False).responses) == 1
    engines.unload("knob")
    turn_knobs(folder, request_ms=10)
    engines.load(EngineSpec("triton", "knob", str(folder)))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: engines.ask("knob", "x"), range(4)))
    assert [(len(a.responses), a.output_tokens) for a in answers] == [(1, 3)] * 4
    engines.unload("knob")


def test_a_native_model_fails_as_its_knobs_say(engines: EngineServer, tmp_path: Path) -> None:
    """A failed load has its text; an error comes after two tokens."""
    broken = knob_model(tmp_path / "broken", fail_load="no room for that")
    with pytest.raises(triton_grpc.InferenceServerException, match="no room for that"):
        engines.load(EngineSpec("triton", "broken", str(broken)))
    failing = knob_model(tmp_path / "failing", error_after_tokens=2)
    engines.load(EngineSpec("triton", "failing", str(failing)))
    answer = engines.ask("failing", "x")
    assert (answer.text, answer.error) == ("tok0 tok1", "engine_fault: told to fail after 2 tokens")


def test_a_model_process_that_dies_leaves_its_stream_silent(engines: EngineServer, tmp_path: Path) -> None:
    """What Triton 2.51 does, and callers must know: no error reaches the stream; new calls are refused by name."""
    dying = knob_model(tmp_path / "dying", die_after_tokens=3, token_interval_ms=10)
    engines.load(EngineSpec("triton", "dying", str(dying)))
    stream = engines.open("dying", "x")
    assert [isinstance(stream.next(), dict) for _ in range(3)] == [True] * 3
    with pytest.raises(queue.Empty):
        stream.next(timeout_s=0.5)
    assert "is not healthy" in (engines.ask("dying", "x").error or "")
    stream.cancel()


def test_a_native_model_notices_that_its_caller_is_gone(engines: EngineServer, tmp_path: Path) -> None:
    """A stream of a minute is cancelled; the model can be unloaded at once, so its request has ended."""
    folder = knob_model(tmp_path / "slow", tokens=600, token_interval_ms=100)
    engines.load(EngineSpec("triton", "slow", str(folder)))
    stream = engines.open("slow", "x")
    assert isinstance(stream.next(), dict)
    stream.cancel()
    begun_s = time.monotonic()
    engines.unload("slow")
    assert time.monotonic() - begun_s < 30  # half of what its stream would have taken

"""The Triton model that `checkpoints.knob_model` puts into its folder. Runs in Triton's stub; needs no weights.

Each request has a thread of its own, which waits in slices so that a cancelled caller is noticed within 5 ms.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Triton's stub runs an isolated interpreter that ignores PYTHONPATH.
sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

CANCEL_POLL_S = 0.005
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """A language model without a model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the knobs; may wait or fail, as they say."""
        repository = Path(args["model_repository"])
        self._knobs: dict[str, Any] = json.loads((repository / "knobs.json").read_text())
        self._stopping = threading.Event()
        self._worker = OneWorker() if self._knobs.get("one_at_a_time") else None
        time.sleep(self._knobs["load_ms"] / 1e3)
        if self._knobs["fail_load"]:
            raise RuntimeError(self._knobs["fail_load"])

    def execute(self, requests: list[Any]) -> None:
        """Answer each request from a thread of its own."""
        for request in requests:
            inputs = read_inputs(request)
            answer = KnobAnswer(self._knobs, inputs, request.get_response_sender(), self._stopping, self._worker)
            threading.Thread(target=answer.run, daemon=True).start()

    def finalize(self) -> None:
        """Let waiting threads end."""
        self._stopping.set()


class OneWorker:
    """A device that runs one request after the other, each for its time and not a moment longer.

    When each ends is fixed when it comes, so that waking up late, or asking Triton whether the caller has left, takes
    nothing from the next one. A caller who leaves does not shorten it."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._lock = threading.Lock()

    def ms_until_done(self, run_ms: float) -> float:
        """Give the next `run_ms` to a request that came now; returns how long it is until it is through."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(now_s, self._free_s) + run_ms / 1e3
            return (self._free_s - now_s) * 1e3


class KnobAnswer:
    """One request."""

    def __init__(
        self,
        knobs: dict[str, Any],
        inputs: dict[str, Any],
        sender: Any,
        stopping: threading.Event,
        worker: OneWorker | None,
    ) -> None:
        self._knobs = knobs
        self._inputs = inputs
        self._sender = sender
        self._stopping = stopping
        self._worker = worker
        self._details = json.loads(inputs.get("roundhouse") or "{}")
        limit = json.loads(inputs.get("sampling_parameters") or "{}").get("max_tokens")
        self._tokens = int(knobs["tokens"] if limit is None else limit)
        self._finish = "stop" if limit is None else "length"
        self._begun_s = time.monotonic()

    def run(self) -> None:
        """Send the whole answer, or as much of it as the knobs and the caller let."""
        if self._details.get("phase") == "embed":
            self._send(0, 0, "stop", embedding=True)
        elif self._knobs["request_ms"] is not None:
            run_ms = self._knobs["request_ms"]
            if self._wait(self._worker.ms_until_done(run_ms) if self._worker else run_ms):
                self._send(0, self._tokens, self._finish)
        elif self._inputs.get("stream"):
            self._stream()
        elif self._wait(self._knobs["token_interval_ms"] * self._tokens) and not self._fault(self._tokens):
            self._send(0, self._tokens, self._finish)

    def _stream(self) -> None:
        for index in range(self._tokens):
            if self._fault(index) or not self._wait(self._knobs["token_interval_ms"]):
                return
            self._send(index, index + 1, self._finish if index + 1 == self._tokens else None)

    def _fault(self, sent: int) -> bool:
        """Die or fail when the knobs say so; True when the request has ended with an error."""
        die, fail = self._knobs["die_after_tokens"], self._knobs["error_after_tokens"]
        if die is not None and sent >= die:
            os._exit(13)
        if fail is None or sent < fail:
            return False
        error = pb_utils.TritonError(f"engine_fault: told to fail after {fail} tokens")
        self._sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)
        return True

    def _wait(self, duration_ms: float) -> bool:
        """Wait unless the caller goes away first; False when it has, and the response stream is closed.

        Whoever has waited to the end is not asked again: Triton takes a part of a millisecond for the answer."""
        until_s = time.monotonic() + duration_ms / 1e3
        while not self._sender.is_cancelled():
            left_s = until_s - time.monotonic()
            self._stopping.wait(max(0.0, min(left_s, CANCEL_POLL_S)))
            if left_s <= CANCEL_POLL_S:
                return True
        self._sender.send(flags=FINAL)
        return False

    def _send(self, start: int, stop: int, finish: str | None, embedding: bool = False) -> None:
        """One response with tokens `start` to `stop`."""
        wanted = self._inputs
        outputs: dict[str, Any] = {"text_output": "".join(token_text(i) for i in range(start, stop))}
        if wanted.get("return_finish_reason"):
            outputs["finish_reason"] = finish or "null"
        if wanted.get("return_num_input_tokens"):
            outputs["num_input_tokens"] = self._prompt_tokens()
        if wanted.get("return_num_output_tokens"):
            outputs["num_output_tokens"] = stop - start
        if wanted.get("return_logprobs"):
            outputs["logprobs"] = json.dumps([token_logprobs(i) for i in range(start, stop)])
        if embedding:
            outputs["embedding"] = np.full(4, 0.5, np.float32)
        if start == 0 or finish:
            spent_ms = (time.monotonic() - self._begun_s) * 1e3
            account = {"cached_tokens": 0, "queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": round(spent_ms, 3)}
            outputs["roundhouse"] = json.dumps(account)
        tensors = [pb_utils.Tensor(name, as_array(value)) for name, value in outputs.items()]
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL if finish else 0)

    def _prompt_tokens(self) -> int:
        """The folder's tokenizer has one token a byte."""
        given = self._details.get("prompt_token_ids")
        return len(self._inputs["text_input"].encode()) if given is None else len(given)


def token_text(index: int) -> str:
    """`tok0`, then ` tok1` and so on."""
    return f"tok{index}" if index == 0 else f" tok{index}"


def token_logprobs(index: int) -> dict[str, Any]:
    """Made-up log probabilities in the shape of the contract."""
    text = token_text(index)
    entry = {"id": index, "token": text, "bytes": list(text.encode()), "logprob": -0.5}
    return {**entry, "top": [entry]}


def read_inputs(request: Any) -> dict[str, Any]:
    """The inputs that are present, as plain values."""
    values: dict[str, Any] = {}
    for tensor in request.inputs():
        value = tensor.as_numpy().reshape(-1)[0]
        values[tensor.name()] = value.decode() if isinstance(value, bytes) else bool(value)
    return values


def as_array(value: Any) -> Any:
    """A tensor of one element; arrays as they are."""
    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    return np.array([value], dtype=np.uint32) if isinstance(value, int) else value

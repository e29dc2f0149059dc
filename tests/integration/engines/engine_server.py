"""A small client of the language-model tensor contract on a real Triton server."""

from __future__ import annotations

import json
import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc

from engines.packaging import EngineSpec, package

CALL_LIMIT_S = 20.0
LOGGED_BYTES = 20_000


@dataclass
class Answer:
    """What one call gave: each response's outputs, and the error text if it ended with one."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """All text together."""
        return "".join(response["text_output"] for response in self.responses)

    @property
    def output_tokens(self) -> int:
        """All tokens generated."""
        return sum(response["num_output_tokens"] for response in self.responses)

    @property
    def last(self) -> dict[str, Any]:
        """The last response."""
        return self.responses[-1]


class Stream:
    """One call on a gRPC stream of its own, as the gateway makes it."""

    def __init__(self, address: str, model: str, inputs: list[Any]) -> None:
        self._client = triton_grpc.InferenceServerClient(address)
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._ended = False
        self._client.start_stream(lambda result, error: self._results.put((result, error)))
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True)

    def next(self, timeout_s: float = CALL_LIMIT_S) -> dict[str, Any] | str | None:
        """The next response's outputs, the text of an error, or None after the last one."""
        result, error = self._results.get(timeout=timeout_s)
        if error is not None:
            return str(error.message())
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        self._ended = final
        if final and not response.outputs:
            return None
        outputs = {output.name: plain(result.as_numpy(output.name)) for output in response.outputs}
        return {**outputs, "_final": final}

    def cancel(self) -> None:
        """Drop the stream, as a client does that goes away."""
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        """End the stream, whether or not it has come to its end, and the connection.

        One that has ended is not cancelled: that can leave its request in Triton for ever, so that the model is never
        unloaded (tried: one time in ten on a busy machine)."""
        self._client.stop_stream(cancel_requests=not self._ended)
        self._client.close()


class EngineServer:
    """A running Triton server, seen through the tensor contract."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self.client = triton_grpc.InferenceServerClient(address)
        self._log = log

    def load(self, spec: EngineSpec) -> float:
        """Load a packaged model; seconds it took."""
        packaged = package(spec)
        begun_s = time.monotonic()
        files = dict(packaged.files)
        self.client.load_model(
            spec.triton_model_name, config=json.dumps(packaged.config), files=files or None, client_timeout=CALL_LIMIT_S
        )
        return time.monotonic() - begun_s

    def unload(self, model: str) -> None:
        """Unload and wait until the index says so."""
        self.client.unload_model(model)
        until_s = time.monotonic() + CALL_LIMIT_S
        while time.monotonic() < until_s:
            index = self.client.get_model_repository_index().models
            if all(entry.state == "UNAVAILABLE" for entry in index if entry.name == model):
                return
            time.sleep(0.02)
        raise AssertionError(f"{model} is still loaded")

    def open(self, model: str, prompt: str, *, stream: bool = True, details: Any = None, **params: Any) -> Stream:
        """Begin a call; `params` are the sampling parameters."""
        inputs = language_request(prompt, stream, json.dumps(params), json.dumps(details) if details else None)
        return Stream(self.address, model, inputs)

    def ask(self, model: str, prompt: str, *, stream: bool = True, details: Any = None, **params: Any) -> Answer:
        """A whole call."""
        opened = self.open(model, prompt, stream=stream, details=details, **params)
        answer = Answer()
        try:
            while True:
                item = opened.next()
                if isinstance(item, str):
                    answer.error = item
                    return answer
                if item is None:
                    return answer
                answer.responses.append(item)
                if item["_final"]:
                    return answer
        finally:
            opened.close()

    def log_tail(self) -> str:
        """The end of the server's log."""
        return self._log.read_bytes()[-LOGGED_BYTES:].decode(errors="replace")


def language_request(prompt: str, stream: bool, parameters: str, details: str | None) -> list[Any]:
    """Input tensors of a call that asks for every optional output but log probabilities."""
    texts = {"text_input": prompt, "sampling_parameters": parameters}
    if details is not None:
        texts["roundhouse"] = details
    flags = {"stream": stream, "return_finish_reason": True, "return_num_input_tokens": True}
    flags["return_num_output_tokens"] = True
    flags["return_logprobs"] = '"logprobs"' in parameters
    inputs = []
    for name, text in texts.items():
        tensor = triton_grpc.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
        inputs.append(tensor)
    for name, flag in flags.items():
        tensor = triton_grpc.InferInput(name, [1], "BOOL")
        tensor.set_data_from_numpy(np.array([flag]))
        inputs.append(tensor)
    return inputs


def plain(array: Any) -> Any:
    """One element as a Python value; longer tensors as arrays."""
    if array.size != 1:
        return array
    value = array.reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else value.item()

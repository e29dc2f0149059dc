"""The reference engine as a model of Triton's Python backend (decoupled). Adapts tensors; decides nothing.

A refused request gets an error response whose text begins with its code (`invalid_request:`,
`context_length_exceeded:`, `numeric_fault:`); the others never notice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from engines.reference.blas_threads import use_one_thread
from engines.reference.engine_loop import EngineLoop
from engines.reference.intake import Call, CallInputs, accept_call, await_prefix
from engines.reference.loaded_model import LoadedModel, load_model
from engines.reference.response import ResponseValues, join_tokens
from engines.reference.sampling_params import InvalidRequest
from engines.reference.sequence import ContextLengthExceeded, Embedded, Event, Failed, TokenGenerated
from engines.reference.token_bytes import TokenText
from engines.reference.token_counters import TokenCounters
from engines.reference.tracing import RequestSpan, RequestTracer

LOOKUP_THREADS = 4  # requests that wait for blocks at once; they wait, they do not compute


class TritonPythonModel:
    """What the stub process instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and start the engine's threads; an exception here fails the load with its text."""
        use_one_thread()
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._model: LoadedModel = load_model(parameters)
        self._tracer = RequestTracer(args["model_name"])
        self._counters = TokenCounters(args["model_name"])
        self._loop = EngineLoop(self._model.engine, pb_utils.Logger.log_error)
        self._loop.start()
        self._waiting = ThreadPoolExecutor(LOOKUP_THREADS, "lookup")

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; answers come from the reply thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                call = accept_call(self._model, read_inputs(request))
            except (InvalidRequest, ContextLengthExceeded) as refusal:
                send_error(sender, str(refusal))
            except Exception as error:  # noqa: BLE001 - one odd request must not take the instance down
                pb_utils.Logger.log_error(f"intake failed: {error!r}")
                send_error(sender, f"engine_fault: {type(error).__name__}")
            else:
                span = self._tracer.begin(call.details.request_id, call.details.traceparent)
                if call.awaits_more:
                    self._waiting.submit(self._submit_later, call, sender, span)
                else:
                    self._loop.submit(call.request, self._reply(call, sender, span))

    def _submit_later(self, call: Call, sender: Any, span: RequestSpan) -> None:
        """Wait for blocks from a disk or another node, then go on with or without them."""
        try:
            call = await_prefix(self._model, call)
            self._loop.submit(call.request, self._reply(call, sender, span))
        except Exception as error:  # noqa: BLE001 - a thread of a pool has nobody who would answer in its place
            pb_utils.Logger.log_error(f"intake failed: {error!r}")
            send_error(sender, f"engine_fault: {type(error).__name__}")

    def _reply(self, call: Call, sender: Any, span: RequestSpan) -> SenderReply:
        return SenderReply(call, self._model.tokens, sender, span, self._counters)

    def finalize(self) -> None:
        """Stop the threads and let go of the block store; Triton calls this after the last request has ended."""
        self._waiting.shutdown()
        self._loop.close()
        self._model.store.close()
        self._tracer.close()


class SenderReply:
    """The way back to one caller through Triton's response sender."""

    def __init__(self, call: Call, tokens: TokenText, sender: Any, span: RequestSpan, counters: TokenCounters) -> None:
        """Nothing is sent yet."""
        self._counters = counters
        self._call = call
        self._tokens = tokens
        self._sender = sender
        self._span = span
        self._sent = False
        self._output_tokens = 0
        self._gathered: list[TokenGenerated] = []

    def is_cancelled(self) -> bool:
        """Ask Triton, which knows of the client's stream."""
        return bool(self._sender.is_cancelled())

    def abandoned(self) -> None:
        """Close the response stream of a caller that is gone."""
        self._ended("cancelled")
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, events: Sequence[Event]) -> None:
        """Send what is ready as one response; without `stream` gather until the end."""
        new = [event for event in events if isinstance(event, TokenGenerated)]
        self._gathered += new
        self._output_tokens += len(new)
        if new and (new[-1].finish or self._call.inputs.stream):
            self._send_gathered()
        last = events[-1]
        if isinstance(last, Embedded):
            self._respond(embedding_values(self._call, last), final=True)
            self._ended("stop")
        elif isinstance(last, Failed):
            send_error(self._sender, last.error)
            self._ended("error")

    def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        finish = gathered[-1].finish
        values = join_tokens(self._call, self._tokens, gathered, first=not self._sent)
        self._respond(values, final=finish is not None)
        self._sent = True
        if finish is not None:
            self._ended(finish)

    def _respond(self, values: ResponseValues, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb_utils.InferenceResponse(output_tensors=output_tensors(values)), flags=flags)

    def _ended(self, outcome: str) -> None:
        self._counters.add(len(self._call.request.prompt), self._output_tokens)
        self._span.end(outcome, len(self._call.request.prompt), self._output_tokens)


def embedding_values(call: Call, event: Embedded) -> ResponseValues:
    """The response to an embedding request."""
    return ResponseValues(
        text_output="",
        finish_reason="stop" if call.inputs.return_finish_reason else None,
        num_input_tokens=len(call.request.prompt) if call.inputs.return_num_input_tokens else None,
        num_output_tokens=0 if call.inputs.return_num_output_tokens else None,
        embedding=event.vector,
        roundhouse=json.dumps({"cached_tokens": 0, "queue_ms": round(event.timings.queue_ms, 3)}),
    )


def read_inputs(request: Any) -> CallInputs:
    """The input tensors of a request as plain values; raises `InvalidRequest` for text that is not UTF-8."""
    values: dict[str, Any] = {}
    for field in fields(CallInputs):
        tensor = pb_utils.get_input_tensor_by_name(request, field.name)
        if tensor is None:
            continue
        array = tensor.as_numpy().reshape(-1)
        if array.size != 1:
            raise InvalidRequest(field.name, f"one value is expected, not {array.size}")
        values[field.name] = _plain(field.name, array[0])
    return CallInputs(**{"text_input": "", **values})


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return bool(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(name, "not valid UTF-8") from None


def output_tensors(values: ResponseValues) -> list[Any]:
    """The outputs that are present, as Triton tensors of one element (`embedding`: of its length)."""
    tensors = []
    for field in fields(ResponseValues):
        value = getattr(values, field.name)
        if value is None:
            continue
        if isinstance(value, str):
            array = np.array([value.encode("utf-8")], dtype=np.object_)
        elif isinstance(value, int):
            array = np.array([value], dtype=np.uint32)
        else:
            array = value
        tensors.append(pb_utils.Tensor(field.name, array))
    return tensors


def send_error(sender: Any, text: str) -> None:
    """End a request with an error."""
    response = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

"""The tensors of the language-model contract as protobuf, without NumPy: each message holds a handful of small ones.

Source: ARCHITECTURE.md, "Triton model contract for language models", and the KServe v2 gRPC protocol. Elements are
little-endian; a BYTES element has its length in 4 bytes before it.
"""

import json
import struct
from collections.abc import Mapping, Sequence

import msgspec
from tritonclient.grpc import service_pb2 as kserve

from roundhouse import telemetry
from services.gateway.domain.tensors import Tensor
from services.gateway.ports import EngineChunk, EngineRequest, TensorReply, TensorRequest

_LENGTH = struct.Struct("<I")
_UINT32 = struct.Struct("<I")
_TRUE, _FALSE = b"\x01", b"\x00"
_UNFINISHED = ("", "null", "None")  # of what is not the last: the reference engine's, vLLM's backend's (tried)

_encode_json = msgspec.json.Encoder().encode


def generate_message(triton_model_name: str, request: EngineRequest) -> kserve.ModelInferRequest:
    """The request for one generation or embedding."""
    message = kserve.ModelInferRequest(model_name=triton_model_name, id=request.request_id)
    fields: dict[str, bytes] = {
        "text_input": _text(request.text_input),
        "stream": _TRUE if request.stream else _FALSE,
        "sampling_parameters": _text(request.sampling_parameters),
        "exclude_input_in_output": _TRUE,
        "return_finish_reason": _TRUE,
        "return_num_input_tokens": _TRUE,
        "return_num_output_tokens": _TRUE,
        "return_logprobs": _TRUE if request.return_logprobs else _FALSE,
        "roundhouse": _text_bytes(_encode_json(_details(request))),
    }
    for name, data in fields.items():
        is_flag = len(data) == 1
        tensor = message.inputs.add(name=name, datatype="BOOL" if is_flag else "BYTES")
        tensor.shape.append(1)
        message.raw_input_contents.append(data)
    return message


def _details(request: EngineRequest) -> dict[str, object]:
    has_adapter = bool(request.adapter_digest)
    return {
        "request_id": request.request_id,
        "phase": request.phase,
        "salt": request.salt,
        "adapter": {"path": request.adapter_path, "digest": request.adapter_digest} if has_adapter else None,
        "prompt_token_ids": request.prompt_token_ids,
        "return_token_ids": request.return_token_ids,
        **_shared(request),
        **_resuming(request),
        "traceparent": (telemetry.trace_headers() or {}).get("traceparent"),
    }


def _shared(request: EngineRequest) -> dict[str, object]:
    """Which leading tokens lie in the cache space of a sharing group; most have none."""
    return {"shared": {"salt": request.shared_salt, "tokens": request.shared_tokens}} if request.shared_tokens else {}


def _resuming(request: EngineRequest) -> dict[str, object]:
    """What a request says that begins on another instance; most say nothing."""
    if not request.resumed_token_ids:
        return {}
    return {
        "resumed_token_ids": request.resumed_token_ids,
        "kv_peers": request.kv_peers,
        "kv_hold": request.kv_hold,
    }


def chunk_of(response: kserve.ModelInferResponse) -> EngineChunk:
    """One response of a generation. Outputs that are left out, or unknown, are ignored."""
    return chunk_of_contents([output.name for output in response.outputs], response.raw_output_contents)


def chunk_of_contents(names: Sequence[str], contents: Sequence[bytes]) -> EngineChunk:
    """One response of a generation, from the names of its outputs and their contents."""
    text, finish, counted = "", None, 0
    input_tokens: int | None = None
    cached: int | None = None
    logprobs: str | None = None
    embedding: tuple[float, ...] | None = None
    prompt_logprobs: str | None = None
    token_ids = b""
    for name, data in zip(names, contents, strict=True):
        match name:
            case "text_output":
                text = _first_text(data)
            case "finish_reason":
                finish = _first_text(data)
            case "num_input_tokens":
                input_tokens = _first_count(data)
            case "num_output_tokens":
                counted = _first_count(data)
            case "logprobs":
                logprobs = _first_text(data)
            case "token_ids":
                token_ids = bytes(data)
            case "roundhouse":
                cached, prompt_logprobs = _details_of(_first_text(data))
            case "embedding":
                embedding = struct.unpack(f"<{len(data) // 4}f", data)
    return EngineChunk(
        text=text,
        output_tokens=counted,
        input_tokens=input_tokens,
        cached_tokens=cached,
        finish_reason=None if finish in _UNFINISHED else finish,
        logprobs=logprobs,
        embedding=embedding,
        prompt_logprobs=prompt_logprobs,
        token_ids=token_ids,
    )


def infer_message(triton_model_name: str, request: TensorRequest) -> kserve.ModelInferRequest:
    """The request for one call of a tensor model."""
    message = kserve.ModelInferRequest(model_name=triton_model_name, id=request.request_id)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for name in request.outputs:
        message.outputs.add(name=name)
    return message


def reply_of(response: kserve.ModelInferResponse) -> TensorReply:
    """The answer of a tensor model; Triton always answers with raw contents."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return TensorReply(tuple(Tensor(o.name, o.datatype, tuple(o.shape), bytes(data)) for o, data in pairs))


def _text(text: str) -> bytes:
    return _text_bytes(text.encode())


def _text_bytes(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _first_text(data: bytes) -> str:
    return data[4 : 4 + _LENGTH.unpack_from(data)[0]].decode("utf-8", "replace") if len(data) >= 4 else ""


def _first_count(data: bytes) -> int:
    return int(_UINT32.unpack_from(data)[0]) if len(data) >= 4 else 0


def _details_of(text: str) -> tuple[int | None, str | None]:
    """Cached tokens, and the log probabilities of the prompt as JSON, as far as an engine says them."""
    try:
        details = json.loads(text)
    except ValueError:
        return None, None
    if not isinstance(details, Mapping):
        return None, None
    cached, scored = details.get("cached_tokens"), details.get("prompt_logprobs")
    return cached if isinstance(cached, int) else None, json.dumps(scored) if isinstance(scored, list) else None

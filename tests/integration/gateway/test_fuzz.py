"""Made-up messages on the gRPC port and made-up tensors on both: no fault of ours, no crash, nothing left behind."""

import asyncio
import json
import struct
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as kserve

from roundhouse.wire.v1 import inference_pb2
from services.gateway.domain.tensors import ELEMENT_BYTES
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, until

METADATA = (("authorization", f"Bearer {KEYS['t1']}"),)
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}  # codes that say that we broke
FEW = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))

NAMES = st.sampled_from(["m", "scorer", "tuned", "absent", "", "a}:b", "../x"]) | st.text(max_size=8)
TEXTS = st.text(max_size=40)
NUMBERS = st.one_of(st.floats(width=64), st.sampled_from([0.0, -1.0, 1e308]))
VALUES = st.one_of(st.integers(), st.floats(), TEXTS, st.none(), st.lists(st.integers()))
UINTS = st.integers(0, 2**32 - 1)


@st.composite
def generations(draw: st.DrawFn) -> inference_pb2.GenerateRequest:
    """A generation with any values that the wire can carry."""
    request = inference_pb2.GenerateRequest(model=draw(NAMES), return_logprobs=draw(st.booleans()))
    request.top_logprobs = draw(st.sampled_from([0, 1, 5, 2**32 - 1]))
    match draw(st.sampled_from(["chat", "text", "tokens", "none"])):
        case "chat":
            for _ in range(draw(st.integers(0, 3))):
                request.chat.messages.add(
                    role=draw(st.sampled_from(["user", "assistant", "system", "tool", "king", ""])),
                    content=draw(TEXTS),
                    tool_calls_json=draw(st.sampled_from(["", "[]", "{", "[5]", '[{"a":1}]'])),
                )
            request.chat.tools_json = draw(st.sampled_from(["", "[]", "null", "[[[", '[{"type":"function"}]']))
        case "text":
            request.text = draw(TEXTS)
        case "tokens":
            request.token_ids.ids.extend(draw(st.lists(UINTS | st.integers(0, 255), max_size=5)))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        if draw(st.integers(0, 4)) == 0:
            setattr(request.sampling, name, draw(NUMBERS))
    request.sampling.max_tokens = draw(st.sampled_from([0, 1, 2, 3, 2**32 - 1]))
    if draw(st.booleans()):
        request.sampling.n = draw(st.sampled_from([0, 1, 2, 17, 2**32 - 1]))
    request.sampling.stop.extend(draw(st.lists(TEXTS, max_size=5)))
    return request


@st.composite
def inferences(draw: st.DrawFn) -> kserve.ModelInferRequest:
    """A tensor call whose parts need not agree."""
    request = kserve.ModelInferRequest(
        model_name=draw(NAMES), model_version=draw(st.sampled_from(["", "1", "999", "x"])), id=draw(TEXTS)
    )
    datatypes = st.sampled_from([*ELEMENT_BYTES, "BYTES", "", "FP99"])
    for _ in range(draw(st.integers(0, 3))):
        shape = draw(st.lists(st.integers(-1, 3) | st.sampled_from([2**31, 2**62]), max_size=4))
        one = request.inputs.add(name=draw(st.sampled_from(["x", "y", ""])), datatype=draw(datatypes), shape=shape)
        if draw(st.booleans()):
            one.contents.fp32_contents.extend(draw(st.lists(st.floats(width=32), max_size=4)))
        if draw(st.booleans()):
            one.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=4), max_size=2)))
    for _ in range(draw(st.integers(0, 3))):
        request.raw_input_contents.append(draw(st.binary(max_size=16)))
    return request


def called(address: str, method: str, request: Any, kind: Any, *, streams: bool, raw: bytes | None = None) -> None:
    """One call; a status that says that we broke is a failure. Blocking."""
    with grpc.insecure_channel(address) as channel:
        shape = (
            (channel.stream_stream if method.endswith("StreamInfer") else channel.unary_stream)
            if streams
            else (channel.unary_unary)
        )
        call: Any = shape(method, request_serializer=lambda data: data, response_deserializer=kind.FromString)
        data = raw if raw is not None else request.SerializeToString()
        try:
            answer = call(iter([data]) if method.endswith("StreamInfer") else data, metadata=METADATA, timeout=20)
            if streams:
                list(answer)
        except grpc.RpcError as error:
            if error.code() in OURS:
                pytest.fail(f"{error.code()} {error.details()} for {request or raw!r}")


@pytest.mark.timeout(300)
async def test_made_up_messages_are_answered_or_refused(gateway: RunningGateway, node: FakeNode) -> None:
    """Cases B41 and B43: every status is the caller's or the mesh's; afterwards no stream and no lease is left."""
    address = f"127.0.0.1:{gateway.addresses.grpc}"

    @FEW
    @given(request=generations())
    def generate(request: Any) -> None:
        called(address, "/roundhouse.v1.Inference/Generate", request, inference_pb2.GenerateResponse, streams=True)

    @FEW
    @given(request=inferences())
    def infer(request: Any) -> None:
        service = "/inference.GRPCInferenceService"
        called(address, f"{service}/ModelInfer", request, kserve.ModelInferResponse, streams=False)
        called(address, f"{service}/ModelStreamInfer", request, kserve.ModelStreamInferResponse, streams=True)

    @FEW
    @given(raw=st.binary(max_size=64), method=st.sampled_from(["Generate", "Embed", "ListModels"]))
    def garbage(raw: bytes, method: str) -> None:
        kind = getattr(inference_pb2, f"{method}Request")
        try:
            kind.FromString(raw)
        except DecodeError:
            return  # bytes that are no message never reach us: grpc itself answers INTERNAL
        reply = getattr(inference_pb2, f"{method}Response")
        called(address, f"/roundhouse.v1.Inference/{method}", None, reply, streams=method == "Generate", raw=raw)

    for fuzzer in (generate, infer, garbage):
        await asyncio.to_thread(fuzzer)
    await until(lambda: node.open_streams == 0, within_s=30)
    async with gateway.client() as client:
        assert (await client.get("/v2/health/live")).status_code == 200


@pytest.mark.timeout(300)
async def test_made_up_tensors_over_rest(gateway: RunningGateway) -> None:
    """Case B43: bodies of JSON and bytes whose lengths lie, and JSON that is none: 200, 4xx, or 503 with a delay."""

    @FEW
    @given(
        shape=st.lists(st.integers(-1, 4) | st.sampled_from([2**40, 1.5]), max_size=3),
        datatype=st.sampled_from([*ELEMENT_BYTES, "BYTES", "x"]),
        data=st.none()
        | st.lists(st.one_of(st.integers(), st.floats(), TEXTS, st.none(), st.lists(st.integers())), max_size=4),
        size=st.none() | st.integers(-1, 64),
        tail=st.binary(max_size=32),
        told=st.none() | st.integers(-5, 400),
    )
    def infer(shape: Any, datatype: str, data: Any, size: int | None, tail: bytes, told: int | None) -> None:
        one: dict[str, Any] = {"name": "x", "shape": shape, "datatype": datatype}
        if data is not None:
            one["data"] = data
        if size is not None:
            one["parameters"] = {"binary_data_size": size}
        head = json.dumps({"inputs": [one]}).encode()
        headers = dict(METADATA)
        if told is not None:
            headers["Inference-Header-Content-Length"] = str(told if told < 0 or told > 64 else len(head) + told)
        answer = httpx.post(f"{gateway.url}/v2/models/scorer/infer", content=head + tail, headers=headers, timeout=30)
        assert answer.status_code < 500, answer.text

    await asyncio.to_thread(infer)
    good = struct.pack("<3f", 1, 2, 3)
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "parameters": {"binary_data_size": 12}}]}
    ).encode()
    async with gateway.client(**{"Inference-Header-Content-Length": str(len(body))}) as client:
        assert (await client.post("/v2/models/scorer/infer", content=body + good)).status_code == 200

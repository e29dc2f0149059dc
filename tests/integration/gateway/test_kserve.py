"""KServe v2 over REST and gRPC, with Triton's own clients, over real NATS and Valkey and a node that echoes tensors."""

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.catalogue.records import Limits
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1 import scheduling_pb2 as wire
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, until
from tests.unit.gateway.gateway_world import catalogue

VALUES = np.array([[1.5, -2.0, 3.25]], dtype=np.float32)
ONE_INPUT = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.5, -2.0, 3.25]}


def key_headers() -> dict[str, str]:
    """A fresh dictionary: Triton's HTTP client writes into the one it is given."""
    return {"authorization": f"Bearer {KEYS['t1']}"}


def http_infer(gateway: RunningGateway, *, binary: bool) -> Any:
    """One call through Triton's HTTP client."""
    client = triton_http.InferenceServerClient(f"127.0.0.1:{gateway.addresses.http}")
    try:
        numbers = triton_http.InferInput("x", [1, 3], "FP32")
        numbers.set_data_from_numpy(VALUES, binary_data=binary)
        texts = triton_http.InferInput("t", [2], "BYTES")
        texts.set_data_from_numpy(np.array(["ď", "你"], dtype=object), binary_data=binary)
        outputs = [triton_http.InferRequestedOutput(name, binary_data=binary) for name in ("x", "t")]
        return client.infer("scorer", [numbers, texts], outputs=outputs, request_id="mine", headers=key_headers())
    finally:
        client.close()


@pytest.mark.parametrize("binary", [True, False])
async def test_tritons_http_client_works_as_it_is(gateway: RunningGateway, binary: bool) -> None:
    """Tensors come back equal, as JSON and as binary data; the id is echoed; one call is one token, operation infer."""
    result = await asyncio.to_thread(http_infer, gateway, binary=binary)
    assert np.array_equal(result.as_numpy("x"), VALUES)
    texts = [text if isinstance(text, str) else text.decode() for text in result.as_numpy("t").tolist()]
    assert texts == ["ď", "你"]
    assert result.get_response()["id"] == "mine"
    [event] = await gateway.usage(1)
    assert (event.data.operation, event.data.input_tokens, event.data.output_tokens) == ("infer", 1, 0)
    assert Outcome.from_wire(event.data.outcome) is Outcome.DONE


def grpc_infer(gateway: RunningGateway) -> Any:
    """One call through Triton's gRPC client."""
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc}") as client:
        numbers = triton_grpc.InferInput("x", [1, 3], "FP32")
        numbers.set_data_from_numpy(VALUES)
        assert client.is_server_live(headers=key_headers())
        assert client.get_server_metadata(headers=key_headers()).name == "roundhouse"
        return client.infer("scorer", [numbers], request_id="mine", headers=key_headers())


async def test_tritons_grpc_client_works_as_it_is(gateway: RunningGateway) -> None:
    """Liveness, metadata and inference with nothing but a key in the headers."""
    result = await asyncio.to_thread(grpc_infer, gateway)
    assert np.array_equal(result.as_numpy("x"), VALUES)
    assert result.get_response().id == "mine"


@pytest.fixture
def stub(gateway: RunningGateway) -> Iterator[Any]:
    """A bare gRPC stub with tenant t1's key."""
    with grpc.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as channel:
        yield kserve_grpc.GRPCInferenceServiceStub(channel)


def request_of(**changes: Any) -> Any:
    """A correct call, changed."""
    message = kserve.ModelInferRequest(model_name="scorer", id="mine")
    message.inputs.add(
        name=changes.get("name", "x"), datatype=changes.get("datatype", "FP32"), shape=changes.get("shape", [1, 3])
    )
    message.raw_input_contents.append(changes.get("raw", VALUES.tobytes()))
    return message


async def grpc_status(stub: Any, request: Any, *, key: str | None = KEYS["t1"], timeout: float = 5) -> Any:
    """Code and details of a call that fails."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.to_thread(stub.ModelInfer, request, timeout=timeout, metadata=metadata)
    return raised.value


async def rest(gateway: RunningGateway, path: str, body: Any, **headers: str) -> Any:
    """One REST call."""
    async with gateway.client(**headers) as client:
        return await client.post(path, json=body)


async def test_statuses_that_clients_can_act_on(gateway: RunningGateway, stub: Any) -> None:
    """Case B04: unknown model and version NOT_FOUND, held load UNAVAILABLE, datatype INVALID_ARGUMENT, no key 16."""
    body = {"inputs": [ONE_INPUT]}
    unknown, version = request_of(), request_of()
    unknown.model_name, version.model_version = "absent", "999"
    assert (await grpc_status(stub, unknown)).code() is grpc.StatusCode.NOT_FOUND
    assert (await grpc_status(stub, version)).code() is grpc.StatusCode.NOT_FOUND
    assert (await rest(gateway, "/v2/models/absent/infer", body)).status_code == 404
    assert (await rest(gateway, "/v2/models/scorer/versions/999/infer", body)).status_code == 404
    wrong = request_of(datatype="INT99")
    assert (await grpc_status(stub, wrong)).code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = await rest(gateway, "/v2/models/scorer/infer", {"inputs": [{**ONE_INPUT, "datatype": "INT32"}]})
    assert refused.status_code == 400
    assert set(refused.json()) == {"error"}
    assert (await grpc_status(stub, request_of(), key=None)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await rest(gateway, "/v2/models/scorer/infer", body, authorization="")).status_code == 401


async def test_a_held_load_is_unavailable_with_a_delay(gateway: RunningGateway, stub: Any) -> None:
    """Case B04 (c): the load outlasts the call's deadline: UNAVAILABLE with RetryInfo, 503 with Retry-After."""
    gateway.scheduler.grants_at_once = False
    gateway.scheduler.accepted = wire.Accepted(cold=True)
    metadata = (("authorization", f"Bearer {KEYS['t1']}"), ("x-request-deadline-ms", "300"))
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.to_thread(stub.ModelInfer, request_of(), timeout=60, metadata=metadata)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    headers = {"x-request-deadline-ms": "300"}
    answer = await rest(gateway, "/v2/models/scorer/infer", {"inputs": [ONE_INPUT]}, **headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_a_deadline_in_the_queue_is_deadline_exceeded(gateway: RunningGateway, stub: Any) -> None:
    """Case B14 over gRPC: the model is loaded but busy."""
    gateway.scheduler.grants_at_once = False
    metadata = (("authorization", f"Bearer {KEYS['t1']}"), ("x-request-deadline-ms", "300"))
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.to_thread(stub.ModelInfer, request_of(), timeout=60, metadata=metadata)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-1, 16]},
        {"shape": [2, 16], "raw": bytes(4 * 16)},
        {"shape": [1_000_000_000, 1_000_000_000]},
        {"datatype": "INT32", "shape": [1], "raw": b"text!"},
        {"raw": VALUES.tobytes()[:-1]},
        {"datatype": "BYTES", "shape": [1], "raw": struct.pack("<I", 2**32 - 1) + b"x"},
        {"shape": [1] * 1000},
    ],
)
async def test_a_tensor_that_lies_is_refused_before_it_is_sent_on(
    gateway: RunningGateway, stub: Any, node: FakeNode, changes: dict[str, Any]
) -> None:
    """Case B43 over gRPC: INVALID_ARGUMENT, nothing submitted; a valid request of t2 is right."""
    assert (await grpc_status(stub, request_of(**changes))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert gateway.scheduler.submitted == []
    async with gateway.client("t2") as client:
        answer = await client.post("/v2/models/scorer/infer", json={"inputs": [ONE_INPUT]})
    assert answer.json()["outputs"][0]["data"] == [1.5, -2.0, 3.25]


def lying_rest_bodies() -> list[tuple[dict[str, str], bytes]]:
    """Headers and bodies of calls that are not what they say."""
    ints = {"name": "x", "shape": [2], "datatype": "INT32"}
    head = json.dumps({"inputs": [{**ints, "parameters": {"binary_data_size": 8}}]}).encode()
    length = "inference-header-content-length"
    return [
        ({}, json.dumps({"inputs": [{**ints, "data": ["a", "b"]}]}).encode()),
        ({}, json.dumps({"inputs": [{**ints, "data": [1]}]}).encode()),
        ({}, json.dumps({"inputs": [{**ints, "data": [1, 2**40]}]}).encode()),
        ({}, json.dumps({"inputs": [{**ints, "shape": [-2], "data": [1, 2]}]}).encode()),
        ({}, json.dumps({"inputs": [{**ints, "shape": [10**18, 10**18], "data": [1]}]}).encode()),
        ({}, json.dumps({"inputs": [{**ints, "data": [1, 2]}] * 2}).encode()),
        ({}, json.dumps({"inputs": []}).encode()),
        ({}, ("[" * 100_000).encode()),
        ({}, json.dumps({"inputs": [{**ints, "data": [[[[[[[[[[[[[[[[[[[[1, 2]]]]]]]]]]]]]]]]]]]]}]}).encode()),
        ({length: str(len(head) + 100)}, head),
        ({length: "-1"}, head),
        ({length: str(len(head))}, head + b"1234"),
        ({length: str(len(head))}, head + b"123456789"),
        ({length: str(len(head) - 1)}, head + b"12345678"),
    ]


@pytest.mark.parametrize("place", range(14))
async def test_a_rest_body_that_lies_is_refused(gateway: RunningGateway, place: int) -> None:
    """Case B43 over REST: 400 with the KServe error shape, and nothing is submitted."""
    headers, content = lying_rest_bodies()[place]
    async with gateway.client() as client:
        answer = await client.post("/v2/models/scorer/infer", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert gateway.scheduler.submitted == []


async def test_a_caller_that_cancels_ends_the_call(gateway: RunningGateway, stub: Any, node: FakeNode) -> None:
    """Case B32 (a): the handler is gone within a second, with one cancelled event."""
    node.hang_after = 0
    call = stub.ModelInfer.future(request_of(), metadata=(("authorization", f"Bearer {KEYS['t1']}"),))
    await until(lambda: len(node.calls) == 1)
    call.cancel()
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED


async def test_a_stream_of_calls_goes_on_after_a_wrong_one(gateway: RunningGateway) -> None:
    """Each call of `ModelStreamInfer` is answered in order, a wrong one by its text; two usage events."""
    metadata = (("authorization", f"Bearer {KEYS['t1']}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        calls = [request_of(), request_of(raw=b"short"), request_of()]
        replies = [reply async for reply in stub.ModelStreamInfer(iter(calls), metadata=metadata, timeout=60)]
    assert [bool(reply.error_message) for reply in replies] == [False, True, False]
    assert replies[2].infer_response.raw_output_contents[0] == VALUES.tobytes()
    await gateway.usage(2)


async def test_a_limit_is_resource_exhausted_with_its_delay(gateway: RunningGateway, stub: Any) -> None:
    """Case B12 over gRPC: RESOURCE_EXHAUSTED carries RetryInfo."""
    gateway.catalogue.replace(catalogue(limits=Limits(requests_per_minute=1)))
    metadata = (("authorization", f"Bearer {KEYS['t1']}"),)
    await asyncio.to_thread(stub.ModelInfer, request_of(), timeout=60, metadata=metadata)
    error = await grpc_status(stub, request_of())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    [detail] = rpc_status.from_call(error).details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    assert 0 < retry.retry_delay.ToMilliseconds() <= 60_000


async def test_parameters_that_name_a_tenant_change_nothing(gateway: RunningGateway) -> None:
    """Case B07 for KServe: parameters are not identity."""
    body = {"inputs": [ONE_INPUT], "parameters": {"tenant_id": "t2", "tenant": "t2"}}
    assert (await rest(gateway, "/v2/models/scorer/infer", body, **{"x-tenant-id": "t2"})).status_code == 200
    [event] = await gateway.usage(1)
    assert event.subject == "t1"


async def test_metadata_says_when_it_is_not_known(gateway: RunningGateway) -> None:
    """No node has the model: ready is false and the tensors are not known yet."""
    async with gateway.client() as client:
        ready = await client.get("/v2/models/scorer/ready")
        metadata = await client.get("/v2/models/scorer")
        index = await client.post("/v2/repository/index", json={})
    assert (ready.status_code, metadata.status_code) == (503, 503)
    assert {"name": "scorer", "version": "1", "state": "UNAVAILABLE"} in index.json()

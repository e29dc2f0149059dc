"""Without the store of limits no inference route runs anything: they refuse alike, and come back by themselves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.wire.v1 import inference_pb2, inference_pb2_grpc
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.infra import FaultyServer
from tests.integration.gateway.openai_calls import CHAT
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway
from tests.integration.gateway.test_kserve import ONE_INPUT, request_of
from tests.unit.gateway.gateway_world import catalogue, llm_model, tensor_model

METADATA = (("authorization", f"Bearer {KEYS['t1']}"),)
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 2}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream": True}),
    ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2}),
    ("/v1/embeddings", {"model": "m", "input": "hi"}),
    ("/v2/models/scorer/infer", {"inputs": [ONE_INPUT]}),
]


@pytest.fixture
async def own_gateway(
    nats_url: str, valkey_server: FaultyServer, tmp_path: Path, node: FakeNode
) -> AsyncIterator[RunningGateway]:
    """A gateway whose store the test may kill."""
    models = (llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m"))), tensor_model())
    async with running_gateway(nats_url, valkey_server.url, catalogue(*models), node=node) as running:
        yield running


async def http_statuses(gateway: RunningGateway) -> list[int]:
    """What each HTTP route answers, and one request with an idempotency key."""
    async with gateway.client() as client:
        answers = [await client.post(path, json=body) for path, body in ROUTES]
        answers.append(await client.post(ROUTES[0][0], json=ROUTES[0][1], headers={"idempotency-key": "one"}))
    assert all(answer.json()["error"] for answer in answers if answer.status_code == 503)
    return [answer.status_code for answer in answers]


async def grpc_codes(gateway: RunningGateway) -> list[grpc.StatusCode]:
    """What each gRPC method for inference answers."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as channel:
        native: Any = inference_pb2_grpc.InferenceStub(channel)
        tensors: Any = kserve_grpc.GRPCInferenceServiceStub(channel)
        generate = inference_pb2.GenerateRequest(model="m", text="hi")
        generate.sampling.max_tokens = 2
        embed = inference_pb2.EmbedRequest(model="m", inputs=[inference_pb2.EmbedInput(text="hi")])
        calls = [
            native.Generate(generate, metadata=METADATA),
            native.Embed(embed, metadata=METADATA),
            tensors.ModelInfer(request_of(), metadata=METADATA),
        ]
        return [await code_of(call) for call in calls]


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call ends."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_inference_route_is_refused_alike_and_comes_back(
    own_gateway: RunningGateway, valkey_server: FaultyServer, node: FakeNode
) -> None:
    """All answer; the store dies: every HTTP route is 503 and every method UNAVAILABLE, and the node hears of none;
    the store returns: all answer again."""
    assert set(await http_statuses(own_gateway)) == {200}
    assert set(await grpc_codes(own_gateway)) == {grpc.StatusCode.OK}
    before = len(node.calls)
    valkey_server.kill()
    assert set(await http_statuses(own_gateway)) == {503}
    assert set(await grpc_codes(own_gateway)) == {grpc.StatusCode.UNAVAILABLE}
    assert len(node.calls) == before
    await asyncio.to_thread(valkey_server.restart)
    async with asyncio.timeout(60):  # the node hears of work again: the store kept the keys
        while len(node.calls) == before:
            await http_statuses(own_gateway)
    assert set(await grpc_codes(own_gateway)) == {grpc.StatusCode.OK}

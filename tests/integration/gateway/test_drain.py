"""A gateway that is told to stop shuts all its doors at once: what runs on one does not keep another open."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.ports import EngineChunk, EngineRequest
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, chunks_of
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

DRAIN_S = 30  # of one door; two of them, one after the other, would outlast the test's patience
PATIENCE_S = 20
REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class HeldNode(FakeNode):
    """Its streams give one token and end when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """As the fake's, with a wait before the second token."""
        async for chunk in super().generate(placement, request, timeout_ms=timeout_ms):
            yield chunk
            await self.may_end.wait()


async def streamed(gateway: RunningGateway, started: asyncio.Event) -> str:
    """A chat of two tokens; `started` is set at its first byte."""
    pieces: list[str] = []
    body = {**CHAT, "stream": True, "max_tokens": 2}
    async with (
        gateway.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body, timeout=60) as answer,
    ):
        async for text in answer.aiter_text():
            started.set()
            pieces.append(text)
    return "".join(pieces)


async def refused_over_grpc(port: int) -> bool:
    """Whether a call is refused within `PATIENCE_S`."""
    metadata = (("authorization", f"Bearer {KEYS['t1']}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(PATIENCE_S * 10):
            try:
                await stub.ServerLive(kserve.ServerLiveRequest(), metadata=metadata, timeout=5)
            except grpc.aio.AioRpcError as error:
                return error.code() in REFUSED
            await asyncio.sleep(0.1)
    return False


async def test_a_stream_over_http_does_not_keep_grpc_open(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """While a stream over HTTP has its time to end, gRPC takes no new call; the stream ends as it should."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    node, started = HeldNode(), asyncio.Event()
    async with running_gateway(nats_url, redis_url, catalogue(model), node=node, drain_seconds=DRAIN_S) as gateway:
        stream = asyncio.create_task(streamed(gateway, started))
        await started.wait()

        async def probing() -> bool:
            refused = await refused_over_grpc(gateway.addresses.grpc)
            assert node.open_streams == 1
            node.may_end.set()
            return refused

        probe = asyncio.create_task(probing())
    assert await probe
    assert chunks_of(await stream)[-1]["choices"][0]["finish_reason"] == "length"

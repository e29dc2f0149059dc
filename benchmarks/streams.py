"""Closed-loop load on a streaming model: through the mesh as an OpenAI client, and straight on Triton.

Both read the same tokens of the same model, so their difference is what the mesh adds.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

OneStream = Callable[[], Awaitable["Stream"]]


@dataclass(frozen=True, slots=True)
class Stream:
    """One finished stream; times in ms from its start."""

    first_token_ms: float
    total_ms: float
    tokens: int


@dataclass(slots=True)
class Load:
    """What one level of load gave."""

    seconds: float
    streams: list[Stream] = field(default_factory=list)

    def plus(self, more: "Load") -> "Load":
        """With what came later."""
        return Load(self.seconds + more.seconds, self.streams + more.streams)

    @property
    def per_second(self) -> float:
        """Requests a second."""
        return len(self.streams) / self.seconds

    def first_token_ms(self, share: float) -> float:
        """Quantile of the time to the first token."""
        return quantile([stream.first_token_ms for stream in self.streams], share)

    def total_ms(self, share: float) -> float:
        """Quantile of the time to the last token."""
        return quantile([stream.total_ms for stream in self.streams], share)


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of the sorted values do not exceed (nearest rank). Raises ValueError if empty."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


async def closed_loop(one_stream: OneStream, *, callers: int, requests: int) -> Load:
    """`callers` callers that each start the next stream when the last one ended, `requests` streams in all."""
    left = requests
    done: list[Stream] = []

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            done.append(await one_stream())

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return Load(time.perf_counter() - began, done)


class MeshClient:
    """Streams chat completions from the gateway."""

    def __init__(self, session: aiohttp.ClientSession, http_url: str, key: str, model: str, max_tokens: int) -> None:
        self._session = session
        self._url = f"{http_url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        message = {"role": "user", "content": "hello there"}
        self._body = json.dumps(
            {"model": model, "messages": [message], "stream": True, "max_tokens": max_tokens, "temperature": 0}
        ).encode()

    async def stream(self) -> Stream:
        """One request. Raises AssertionError if it is refused or ends without `[DONE]`."""
        began = time.perf_counter()
        first, tokens, done = 0.0, 0, False
        async with self._session.post(self._url, data=self._body, headers=self._headers) as response:
            assert response.status == 200, f"{response.status}: {(await response.text())[:300]}"
            async for line in response.content:
                if line.startswith(b'data: {"') and b'"content":"' in line and b'"role"' not in line:
                    first = first or time.perf_counter() - began
                    tokens += 1
                done = done or line.startswith(b"data: [DONE]")
        assert done, "the stream ended early"
        return Stream(first * 1000, (time.perf_counter() - began) * 1000, tokens)


class TritonClient:
    """Streams from one Triton model with the language-model contract, one gRPC stream a request as the gateway does."""

    def __init__(self, address: str, model_name: str, message: service_pb2.ModelInferRequest) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._message = message
        self._message.model_name = model_name

    async def stream(self) -> Stream:
        """One request. Raises AssertionError on an engine error."""
        began = time.perf_counter()
        first, tokens = 0.0, 0
        call = self._stub.ModelStreamInfer()
        await call.write(self._message)
        await call.done_writing()
        async for reply in call:
            assert not reply.error_message, reply.error_message
            first = first or time.perf_counter() - began
            tokens += 1
        return Stream(first * 1000, (time.perf_counter() - began) * 1000, tokens)

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

"""Case B32, B46: nothing runs for nobody. The client leaves in every way, at every stage, on every protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1 import inference_pb2, inference_pb2_grpc
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway, until
from tests.unit.gateway.gateway_world import catalogue, llm_model

WITHIN_S = 30  # the promise is 1 s; a busy machine may take longer, a missing notice would take the deadline of 120 s
MANY = {**CHAT, "max_tokens": 400}


@pytest.fixture
async def both(nats_url: str, redis_url: str, tmp_path: Path, node: FakeNode) -> AsyncIterator[RunningGateway]:
    """A gateway that also speaks HTTP/2."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    async with running_gateway(nats_url, redis_url, catalogue(model), node=node, http2_port=0) as running:
        yield running


def http1(gateway: RunningGateway, stream: bool) -> bytes:
    """A request as bytes."""
    return request_bytes("/v1/chat/completions", {**MANY, "stream": stream})


def request_bytes(path: str, fields: object) -> bytes:
    """A POST of tenant t1 as bytes."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEYS['t1']}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class Http2Client:
    """One stream on one connection, to be reset or dropped."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.data = b""

    async def ask(self, stream: bool) -> None:
        """Send the request."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._state.initiate_connection()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", "/v1/chat/completions"), (":authority", "g")]
        self._state.send_headers(1, [*headers, ("authorization", f"Bearer {KEYS['t1']}")])
        self._state.send_data(1, json.dumps({**MANY, "stream": stream}).encode(), end_stream=True)
        self._flush()

    async def read_some(self) -> None:
        """Read until there is data."""
        while not self.data:
            for event in self._state.receive_data(await self._reader.read(65_536)):
                if isinstance(event, h2.events.DataReceived):
                    self.data += event.data or b""
            self._flush()

    def reset(self) -> None:
        """Cancel the stream; the connection stays."""
        self._state.reset_stream(1, error_code=8)
        self._flush()

    def drop(self) -> None:
        """Hang up."""
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write(self._state.data_to_send())


Stage = Callable[[RunningGateway, FakeNode], None]


def in_queue(gateway: RunningGateway, node: FakeNode) -> None:
    """No grant comes."""
    gateway.scheduler.grants_at_once = False


def in_prefill(gateway: RunningGateway, node: FakeNode) -> None:
    """The engine has it and says nothing."""
    node.hang_after = 0


def in_decode(gateway: RunningGateway, node: FakeNode) -> None:
    """Tokens come, slowly."""
    node.interval_ms = 20


def begun(gateway: RunningGateway, node: FakeNode, stage: Stage) -> bool:
    """Whether the request has reached the stage."""
    return bool(gateway.scheduler.submitted) if stage is in_queue else node.open_streams == 1


async def assert_nothing_runs(gateway: RunningGateway, node: FakeNode, stage: Stage) -> None:
    """The engine's stream is closed, or the queue entry taken out, and there is one event, cancelled."""
    if stage is in_queue:
        await until(lambda: len(gateway.scheduler.cancelled) == 1, within_s=WITHIN_S)
    else:
        await until(lambda: node.open_streams == 0, within_s=WITHIN_S)
        assert node.cancelled == 1
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED


@pytest.mark.parametrize("stage", [in_queue, in_prefill, in_decode])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_on_http1(
    gateway: RunningGateway, node: FakeNode, stage: Stage, stream: bool
) -> None:
    """Streaming or not."""
    stage(gateway, node)
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http)
    writer.write(http1(gateway, stream))
    await until(lambda: begun(gateway, node, stage), within_s=WITHIN_S)
    writer.close()
    await assert_nothing_runs(gateway, node, stage)


KINDS = {
    "two choices": ("/v1/completions", {"model": "m", "prompt": "hi", "n": 2}),
    "vectors": ("/v1/embeddings", {"model": "m", "input": "hi"}),
    "tensors": (
        "/v2/models/scorer/infer",
        {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]},
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("connection", ["new", "kept"])
async def test_a_client_that_hangs_up_on_any_route(
    gateway: RunningGateway, node: FakeNode, kind: str, connection: str
) -> None:
    """Case B10, B32: whatever was asked, in the queue; also right behind an answer on the same connection."""
    gateway.scheduler.grants_at_once = connection == "kept"
    path, body = KINDS[kind]
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http)
    if connection == "kept":
        writer.write(request_bytes(path, body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        gateway.scheduler.grants_at_once = False
        await reader.readexactly(length)
    before = len(gateway.scheduler.submitted)
    writer.write(request_bytes(path, body))
    await until(lambda: len(gateway.scheduler.submitted) == before + 1, within_s=WITHIN_S)
    writer.close()
    await until(lambda: len(gateway.scheduler.cancelled) == 1, within_s=WITHIN_S)
    events = await gateway.usage(1 + before)
    assert Outcome.from_wire(events[-1].data.outcome) is Outcome.CANCELLED
    assert events[-1].data.output_tokens == 0


@pytest.mark.parametrize("stage", [in_queue, in_prefill, in_decode])
@pytest.mark.parametrize("how", ["reset", "drop"])
async def test_a_client_that_leaves_on_http2(both: RunningGateway, node: FakeNode, stage: Stage, how: str) -> None:
    """The stream is reset while the connection stays, or all is dropped."""
    stage(both, node)
    client = Http2Client(both.addresses.http2)
    await client.ask(stream=stage is in_decode)
    await until(lambda: begun(both, node, stage), within_s=WITHIN_S)
    if stage is in_decode:
        await client.read_some()
    getattr(client, how)()
    await assert_nothing_runs(both, node, stage)
    client.drop()


@pytest.mark.parametrize("stage", [in_queue, in_prefill, in_decode])
async def test_a_caller_that_cancels_on_grpc(gateway: RunningGateway, node: FakeNode, stage: Stage) -> None:
    """The native API: the call is cancelled."""
    stage(gateway, node)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model="m", text="hello")
        request.sampling.max_tokens = 400
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {KEYS['t1']}"),))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: begun(gateway, node, stage), within_s=WITHIN_S)
        call.cancel()
        await asyncio.wait((reading,))
        await assert_nothing_runs(gateway, node, stage)


async def test_http2_gives_the_same_answers(both: RunningGateway) -> None:
    """A stream and a whole answer with an HTTP/2 client; several at once on its one connection."""
    headers = {"authorization": f"Bearer {KEYS['t1']}"}
    url = f"http://127.0.0.1:{both.addresses.http2}/v1/chat/completions"
    async with httpx.AsyncClient(http1=False, http2=True, headers=headers, timeout=WITHIN_S) as client:
        bodies = [{**CHAT, "max_tokens": 3, "stream": bool(number % 2)} for number in range(6)]
        answers = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
    assert {answer.http_version for answer in answers} == {"HTTP/2"}
    assert all(answer.status_code == 200 for answer in answers)
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers[1::2])
    assert answers[0].json()["usage"]["completion_tokens"] == 3


async def test_http2_streams_end_before_the_gateway_does(
    nats_url: str, redis_url: str, tmp_path: Path, node: FakeNode
) -> None:
    """A drain: 20 tokens of 50 ms all come although the gateway is told to stop at the first."""
    node.interval_ms = 50
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    started, text = asyncio.Event(), []

    async def read(port: int) -> None:
        headers = {"authorization": f"Bearer {KEYS['t1']}"}
        async with (
            httpx.AsyncClient(http1=False, http2=True, headers=headers, timeout=WITHIN_S) as client,
            client.stream(
                "POST",
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json={**CHAT, "max_tokens": 20, "stream": True},
            ) as answer,
        ):
            async for piece in answer.aiter_text():
                started.set()
                text.append(piece)

    async with running_gateway(
        nats_url, redis_url, catalogue(model), node=node, http2_port=0, drain_seconds=WITHIN_S
    ) as gateway:
        reading = asyncio.create_task(read(gateway.addresses.http2))
        await started.wait()
    await reading
    assert "".join(text).endswith("data: [DONE]\n\n")

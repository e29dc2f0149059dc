"""What a gateway does while parts around it fail, and when it is told to stop."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from nats.js.errors import NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from roundhouse import subjects
from roundhouse.event_bus import NatsBus
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.infra import FaultyServer
from tests.integration.gateway.openai_calls import CHAT, chunks_of, leave, post
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

STREAM = {**CHAT, "stream": True, "max_tokens": 40}


@pytest.fixture
def slow_node() -> FakeNode:
    """40 tokens take 2 s."""
    return FakeNode(interval_ms=50)


@pytest.fixture
async def own_gateway(
    nats_server: FaultyServer, valkey_server: FaultyServer, tmp_path: Path, slow_node: FakeNode
) -> AsyncIterator[RunningGateway]:
    """A gateway whose servers the test may kill."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    async with running_gateway(nats_server.url, valkey_server.url, catalogue(model), node=slow_node) as running:
        yield running


async def first_line(gateway: RunningGateway, body: Any, started: asyncio.Event) -> str:
    """A whole stream; `started` is set at its first byte."""
    pieces: list[str] = []
    async with gateway.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for text in answer.aiter_text():
            started.set()
            pieces.append(text)
    return "".join(pieces)


async def stored_event(nats_url: str, tenant: str, *, within_s: float) -> UsageEvent:
    """The tenant's last event in the stream. A subscriber that reconnects later than the gateway would miss it."""
    bus = await NatsBus.connect(nats_url, name="test")
    async with asyncio.timeout(within_s):
        while True:
            try:
                found = await bus.jetstream.get_last_msg(subjects.USAGE_STREAM, subjects.usage(tenant))
                break
            except NotFoundError:
                await asyncio.sleep(0.05)
    await bus.close()
    return UsageEvent.FromString(found.data or b"")


async def test_a_lost_bus_ends_no_stream_and_loses_no_bill(
    own_gateway: RunningGateway, nats_server: FaultyServer
) -> None:
    """Invariant 18, case B38: NATS dies mid-stream: all 40 tokens come, new work is 503; after its return the usage
    event arrives, and readiness and work are back."""
    started = asyncio.Event()
    stream = asyncio.create_task(first_line(own_gateway, STREAM, started))
    await started.wait()
    nats_server.kill()
    refused = await post(own_gateway, "/v1/chat/completions", CHAT)
    assert refused.status_code == 503
    chunks = chunks_of(await stream)
    assert len([chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]) == 40
    async with httpx.AsyncClient(base_url=own_gateway.url) as client:
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
    await asyncio.to_thread(nats_server.restart)
    assert (await stored_event(nats_server.url, "t1", within_s=60)).data.output_tokens == 40
    async with httpx.AsyncClient(base_url=own_gateway.url) as client, asyncio.timeout(60):
        while (await client.get("/health/ready")).status_code != 200:  # noqa: ASYNC110 - it comes back by itself
            await asyncio.sleep(0.1)
    answer = await post(own_gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert answer.status_code == 200


async def test_a_lost_store_ends_no_stream_and_gives_the_slot_back_later(
    own_gateway: RunningGateway, valkey_server: FaultyServer
) -> None:
    """Invariant 18: Valkey dies mid-stream: all tokens come and the bill is written; new work is 503."""
    started = asyncio.Event()
    stream = asyncio.create_task(first_line(own_gateway, STREAM, started))
    await started.wait()
    valkey_server.kill()
    chunks = chunks_of(await stream)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    [event] = await own_gateway.usage(1)
    assert event.data.output_tokens == 40
    refused = await post(own_gateway, "/v1/chat/completions", CHAT)
    assert refused.status_code == 503
    await asyncio.to_thread(valkey_server.restart)


async def test_a_gateway_that_is_told_to_stop_ends_its_streams_first(
    nats_url: str, redis_url: str, tmp_path: Path, slow_node: FakeNode
) -> None:
    """A drain: the port is closed to new calls, the running stream gets all 40 tokens and its bill."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    started = asyncio.Event()
    async with running_gateway(nats_url, redis_url, catalogue(model), node=slow_node) as gateway:
        stream = asyncio.create_task(first_line(gateway, STREAM, started))
        await started.wait()
    chunks = chunks_of(await stream)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [event.data.output_tokens for event in gateway.events] == [40]
    assert gateway.scheduler.finishes[0].output_tokens == 40


async def test_a_drain_that_takes_too_long_ends_streams_as_cancelled_with_their_bill(
    nats_url: str, redis_url: str, tmp_path: Path, slow_node: FakeNode
) -> None:
    """After one second the stream of 20 s is cut: the event is there, cancelled, with what came."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    started = asyncio.Event()
    async with running_gateway(nats_url, redis_url, catalogue(model), node=slow_node, drain_seconds=1) as gateway:
        stream = asyncio.create_task(first_line(gateway, {**STREAM, "max_tokens": 400}, started))
        await started.wait()
    with pytest.raises(httpx.RemoteProtocolError):
        await stream
    [event] = gateway.events
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED
    assert 10 < event.data.output_tokens < 100
    assert slow_node.open_streams == 0


async def series(gateway: RunningGateway) -> Iterator[tuple[str, dict[str, str], float]]:
    """Every sample of the metrics page, which must parse."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{gateway.addresses.ops}/metrics")).text
    assert len(page) < 1_000_000
    return (
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    )


async def test_callers_make_no_labels(gateway: RunningGateway) -> None:
    """Invariant 17, case B45: names, paths, ids and users of callers add no series."""
    await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    before = len(list(await series(gateway)))
    async with gateway.client() as client:
        for number in range(50):
            body = {**CHAT, "model": f'no"such\n{number}' * 20, "user": f"u{number}"}
            headers = {"x-request-id": f"mine-{number}"}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 404
            await client.get(f"/v1/{number}")
    assert len(list(await series(gateway))) - before <= 10


def _has_submitted(gateway: RunningGateway, count: int) -> bool:
    return len(gateway.scheduler.submitted) == count


async def test_gauges_come_down_again(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B46: callers who leave the queue and the stream lower what they raised; started = the sum of endings."""

    async def gauge(name: str) -> float:
        return sum(value for sample, _, value in await series(gateway) if sample == name)

    gateway.scheduler.grants_at_once = False
    for number in range(1, 6):
        await leave(gateway, CHAT, partial(_has_submitted, gateway, number))
    gateway.scheduler.grants_at_once, node.interval_ms = True, 20
    await leave(gateway, {**CHAT, "max_tokens": 400}, lambda: node.sent > 0)
    await gateway.usage(6)
    assert await gauge("roundhouse_gateway_requests_waiting") == 0
    assert await gauge("roundhouse_gateway_requests_in_flight") == 0
    started = await gauge("roundhouse_gateway_requests_started_total")
    assert started == await gauge("roundhouse_gateway_requests_ended_total")


async def test_logs_hold_no_prompt_and_no_key(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 16: neither text nor key is written, also when the request fails."""
    secret = "the-secret-of-the-prompt"
    body = {**CHAT, "messages": [{"role": "user", "content": secret}], "max_tokens": 1}
    await post(gateway, "/v1/chat/completions", body)
    await post(gateway, "/v1/chat/completions", {**body, "logit_bias": {secret: 1}})
    async with gateway.client(authorization=f"Bearer {secret}") as client:
        await client.get("/v1/models")
    written = capsys.readouterr()
    assert "request" in written.out
    assert secret not in written.out + written.err
    assert json.dumps(secret) not in written.out

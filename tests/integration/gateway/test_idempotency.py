"""`Idempotency-Key` through a whole gateway over real NATS and Valkey: run once, billed once, answered every time."""

import asyncio
from typing import Any

import httpx
import pytest

from roundhouse.vocabulary import Outcome
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, chunks_of, leave
from tests.integration.gateway.running_gateway import RunningGateway, until

SAY = {**CHAT, "max_tokens": 3}


async def call(
    gateway: RunningGateway, body: Any, key: str | None = "key-1", *, path: str = "chat/completions", tenant: str = "t1"
) -> httpx.Response:
    """One request with an idempotency key."""
    headers = {} if key is None else {"Idempotency-Key": key}
    async with gateway.client(tenant, **headers) as client:
        return await client.post(f"/v1/{path}", json=body)


async def test_a_repeated_request_is_answered_and_not_run_again(gateway: RunningGateway, node: FakeNode) -> None:
    """Invariant 13: three calls, one engine call, one usage event, one request counted; equal JSON is the same body."""
    first = await call(gateway, SAY)
    again = await call(gateway, SAY)
    reordered = await call(gateway, dict(reversed(SAY.items())))
    assert first.status_code == again.status_code == reordered.status_code == 200
    assert first.content == again.content == reordered.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert again.headers["x-original-request-id"] == first.headers["x-request-id"] != again.headers["x-request-id"]
    await gateway.usage(1)
    assert len(node.calls) == 1
    assert len(gateway.scheduler.submitted) == 1


async def test_a_stream_is_kept_whole(gateway: RunningGateway) -> None:
    """The same events, to the last byte, [DONE] included."""
    body = {**SAY, "stream": True, "stream_options": {"include_usage": True}}
    first, again = await call(gateway, body), await call(gateway, body)
    assert chunks_of(first.text) == chunks_of(again.text)
    assert first.content == again.content
    assert again.headers["content-type"].startswith("text/event-stream")
    await gateway.usage(1)


async def test_embeddings_too(gateway: RunningGateway) -> None:
    """Every endpoint of the API takes a key, and a key of one endpoint is not one of another."""
    body = {"model": "m", "input": "hi"}
    assert (await call(gateway, body, path="embeddings")).content == (
        await call(gateway, body, path="embeddings")
    ).content
    await gateway.usage(1)
    assert (await call(gateway, {"model": "m", "prompt": "hi"}, path="completions")).status_code == 409


async def test_another_body_is_a_conflict(gateway: RunningGateway) -> None:
    """409 with the header as `param`; the other tenant's same key is its own; other keys go on."""
    await call(gateway, SAY)
    other = await call(gateway, {**SAY, "max_tokens": 4})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert (await call(gateway, {**SAY, "max_tokens": 4}, tenant="t2")).status_code == 200
    assert (await call(gateway, {**SAY, "max_tokens": 4}, "key-2")).status_code == 200


async def test_twins_wait_for_the_first(gateway: RunningGateway, node: FakeNode) -> None:
    """Eight at once: one runs, all eight have its answer."""
    node.interval_ms = 100
    answers = await asyncio.gather(*(call(gateway, SAY) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(node.calls) == 1
    await gateway.usage(1)


async def test_a_client_that_is_cut_off_finds_the_answer_when_it_comes_again(
    gateway: RunningGateway, node: FakeNode
) -> None:
    """The connection is lost while the engine runs: the run goes on, is billed once, and waits for the retry."""
    node.interval_ms = 100
    await leave(gateway, {**SAY, "max_tokens": 10}, lambda: node.sent > 0, **{"Idempotency-Key": "k"})
    again = await call(gateway, {**SAY, "max_tokens": 10}, "k")
    assert again.status_code == 200
    assert again.json()["usage"]["completion_tokens"] == 10
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.DONE
    assert len(node.calls) == 1


async def test_what_fails_is_not_kept(gateway: RunningGateway, node: FakeNode) -> None:
    """A failed stream and a refused request give the key back; the next try runs."""
    node.names_tokens, node.fail_after, node.failures_left = False, 1, 1
    body = {**SAY, "stream": True}
    failed = await call(gateway, body)
    assert "error" in failed.text
    assert "[DONE]" not in failed.text
    good = await call(gateway, body)
    assert "[DONE]" in good.text
    gateway.scheduler.grants_at_once = False
    async with gateway.client(**{"Idempotency-Key": "late", "x-request-deadline-ms": "300"}) as client:
        assert (await client.post("/v1/chat/completions", json=SAY)).status_code == 504
    gateway.scheduler.grants_at_once = True
    assert (await call(gateway, SAY, "late")).status_code == 200


async def test_a_twin_that_waits_ends_at_its_deadline(gateway: RunningGateway) -> None:
    """Case B14: the first is still queued; the twin's own deadline is 504, and it takes nothing from anybody."""
    gateway.scheduler.grants_at_once = False
    first = asyncio.create_task(call(gateway, SAY))
    await until(lambda: len(gateway.scheduler.submitted) == 1)
    async with gateway.client(**{"Idempotency-Key": "key-1", "x-request-deadline-ms": "500"}) as client:
        assert (await client.post("/v1/chat/completions", json=SAY)).status_code == 504
    await gateway.scheduler.grant(gateway.scheduler.submitted[0])
    assert (await first).status_code == 200
    assert len(gateway.scheduler.submitted) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_what_is_no_key_is_refused(gateway: RunningGateway, key: str) -> None:
    """Empty, or longer than anyone needs."""
    answer = await call(gateway, SAY, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")
    assert gateway.scheduler.submitted == []


async def test_without_a_key_every_request_runs(gateway: RunningGateway) -> None:
    """Opt in: two equal requests are two."""
    await call(gateway, SAY, None)
    await call(gateway, SAY, None)
    await gateway.usage(2)
    assert len(gateway.scheduler.submitted) == 2

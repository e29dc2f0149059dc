"""How OpenAI requests end over real NATS and Valkey: failures, departures, deadlines, refusals."""

import json
import time

import pytest

from roundhouse.catalogue.records import Limits
from roundhouse.vocabulary import ModelName, Outcome
from roundhouse.wire.v1 import scheduling_pb2 as wire
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, data_of, leave, post
from tests.integration.gateway.running_gateway import RunningGateway, until
from tests.unit.gateway.gateway_world import catalogue


async def test_an_engine_that_dies_mid_stream_is_one_error_event(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B29: three tokens, then one error object; no finish chunk, no [DONE]; the event says failed, 4 + 3."""
    node.names_tokens, node.fail_after = False, 3  # so that no other attempt goes on
    answer = await post(gateway, "/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 8})
    events = data_of(answer.text)
    assert "error" in json.loads(events[-1])
    assert [text for text in events if text == "[DONE]"] == []
    choices = [json.loads(text)["choices"][0] for text in events[:-1]]
    assert all(choice["finish_reason"] is None for choice in choices)
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.FAILED
    assert (event.data.input_tokens, event.data.output_tokens) == (4, 3)


async def test_a_client_that_leaves_mid_stream_pays_what_was_generated(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B35 (a): after 5 tokens the connection closes; one cancelled event of 4 + at least 5, the engine stopped."""
    node.interval_ms = 20
    async with gateway.client() as client:
        body = {**CHAT, "stream": True, "max_tokens": 400}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith('data: {"id"') and '"content":"tok' in line
                if seen == 5:
                    break
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED
    assert event.data.input_tokens == 4
    assert 5 <= event.data.output_tokens < 20
    await until(lambda: len(gateway.scheduler.finishes) == 1)
    assert gateway.scheduler.finishes[0].output_tokens == event.data.output_tokens
    assert node.open_streams == 0


async def test_a_client_that_leaves_a_whole_answer_stops_the_engine(gateway: RunningGateway, node: FakeNode) -> None:
    """Not only streams notice: the engine's stream is closed and what it made is billed."""
    node.interval_ms = 20
    await leave(gateway, {**CHAT, "max_tokens": 400}, lambda: node.sent > 0)
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED
    assert 1 <= event.data.output_tokens < 40
    assert node.open_streams == 0


async def test_a_client_that_leaves_the_queue_pays_nothing(gateway: RunningGateway) -> None:
    """Case B35 (c): one event of 0 tokens, the queue entry cancelled, a late grant not wanted."""
    gateway.scheduler.grants_at_once = False
    await leave(gateway, CHAT, lambda: bool(gateway.scheduler.submitted))
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED
    assert (event.data.input_tokens, event.data.output_tokens) == (0, 0)
    await until(lambda: len(gateway.scheduler.cancelled) == 1)
    assert not await gateway.scheduler.grant(gateway.scheduler.submitted[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_in_the_queue_is_told_in_time(gateway: RunningGateway, stream: bool) -> None:
    """Case B14: about 1 s, status 504 for both, because the stream's header was not out; 0 tokens."""
    gateway.scheduler.grants_at_once = False
    began = time.monotonic()
    answer = await post(
        gateway, "/v1/chat/completions", {**CHAT, "stream": stream}, **{"x-request-deadline-ms": "1000"}
    )
    assert time.monotonic() - began > 0.9
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    [event] = await gateway.usage(1)
    assert (event.data.input_tokens, event.data.output_tokens) == (0, 0)


async def test_a_waiting_stream_hears_comments_and_an_error_event_at_its_deadline(gateway: RunningGateway) -> None:
    """Case B14 with the header out: after a comment at 2 s, the deadline at 2.5 s is one error event."""
    gateway.scheduler.grants_at_once = False
    body = {**CHAT, "stream": True}
    answer = await post(gateway, "/v1/chat/completions", body, **{"x-request-deadline-ms": "2500"})
    assert answer.status_code == 200
    assert ": waiting stage=queued position=0 estimated_ms=0" in answer.text
    [only] = data_of(answer.text)
    assert json.loads(only)["error"]["code"] == "deadline_exceeded"


async def test_limits_are_told_in_headers(gateway: RunningGateway) -> None:
    """10 requests a minute: nine are left after the first; the eleventh is 429 with a true delay."""
    limits = Limits(requests_per_minute=10)
    model = gateway.catalogue.current.models[ModelName("m")]
    gateway.catalogue.replace(catalogue(model, limits=limits))
    first = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert first.headers["x-ratelimit-limit-requests"] == "10"
    assert first.headers["x-ratelimit-remaining-requests"] == "9"
    assert first.headers["x-ratelimit-reset-requests"]
    for _ in range(9):
        await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    refused = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])


async def test_a_full_queue_is_429_with_the_schedulers_delay(gateway: RunningGateway) -> None:
    """The refusal's 2,500 ms are told as 3 s, and exactly."""
    gateway.scheduler.refused = wire.Refused(reason=wire.Refused.REASON_QUEUE_FULL, retry_after_ms=2_500)
    answer = await post(gateway, "/v1/chat/completions", CHAT)
    assert answer.status_code == 429
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")


async def test_without_a_scheduler_new_requests_are_503(gateway: RunningGateway) -> None:
    """Nobody listens: unavailable, at once."""
    await gateway.scheduler.stop()
    answer = await post(gateway, "/v1/chat/completions", CHAT)
    assert answer.status_code == 503

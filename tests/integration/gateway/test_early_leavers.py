"""Clients that leave early, in all three ways: one event each, and the quota was charged what the event says."""

import asyncio

import pytest

from roundhouse.redis_edge import open_redis
from roundhouse.settlements import settlements_key
from roundhouse.vocabulary import Outcome
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, leave
from tests.integration.gateway.running_gateway import RunningGateway


async def quota_of(redis_url: str) -> dict[str, int]:
    """Tokens charged to the quota, by request."""
    redis = open_redis(redis_url)
    try:
        entries = await redis.xrange(settlements_key("t1"))
    finally:
        await redis.aclose()
    return {fields[b"r"].decode(): int(fields[b"t"]) for _, fields in entries}


@pytest.mark.parametrize("how", ["mid stream", "before [DONE]", "queued"])
async def test_the_quota_and_the_event_agree_however_early_a_client_leaves(
    gateway: RunningGateway, node: FakeNode, redis_url: str, how: str
) -> None:
    """Case B35 without `stream_options`: (a) after 5 pieces: cancelled, the whole prompt and at least 5 tokens; (b) all
    read and closed before `[DONE]`: done, the full count; (c) while queued: 0 tokens. The quota was charged that."""
    node.interval_ms = 20 if how == "mid stream" else 0
    gateway.scheduler.grants_at_once = how != "queued"
    body = {**CHAT, "stream": True, "max_tokens": 400 if how == "mid stream" else 8}
    if how == "queued":
        await leave(gateway, body, lambda: bool(gateway.scheduler.submitted))
    else:
        async with gateway.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += '"content":"tok' in line
                if (how == "mid stream" and seen == 5) or '"finish_reason":"' in line:
                    break
    [event] = await gateway.usage(1)
    data = event.data
    outcome = Outcome.from_wire(data.outcome)
    expected = {"mid stream": Outcome.CANCELLED, "before [DONE]": Outcome.DONE, "queued": Outcome.CANCELLED}
    assert outcome is expected[how]
    if how == "mid stream":
        assert data.input_tokens == 4
        assert 5 <= data.output_tokens < 20
    else:
        assert (data.input_tokens, data.output_tokens) == ((4, 8) if how == "before [DONE]" else (0, 0))
    charged: dict[str, int] = {}
    async with asyncio.timeout(30):
        while data.request_id not in charged:  # the settlement follows the event
            charged = await quota_of(redis_url)
    assert charged[data.request_id] == data.input_tokens + data.output_tokens

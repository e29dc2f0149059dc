"""The OpenAI API of a gateway over real NATS and Valkey, with a scheduler and a node of the test's own."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def node() -> FakeNode:
    """The node behind every grant."""
    return FakeNode()


@pytest.fixture
async def gateway(nats_url: str, redis_url: str, tmp_path: Path, node: FakeNode) -> AsyncIterator[RunningGateway]:
    """A gateway with the model `m`, whose tokenizer has one token a byte."""
    folder = random_checkpoint(tmp_path / "m")
    model = llm_model(tokenizer_path=str(folder))
    async with running_gateway(nats_url, redis_url, catalogue(model), node=node) as running:
        yield running


async def test_a_streamed_chat_has_the_events_that_clients_expect(gateway: RunningGateway) -> None:
    """Role, deltas, finish, a comment with the times, [DONE]; one id on all."""
    body = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 2}
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(text) for text in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "tok0 "}, {"content": "tok1 "}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert ": roundhouse queue_ms=1 stage_ms=0 load_ms=0 first_token_ms=" in answer.text
    [event] = await gateway.usage(1)
    assert event.data.output_tokens == 2
    assert answer.headers["x-request-id"] == event.data.request_id

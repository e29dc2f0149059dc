"""How long anyone waits: after a refusal, until a deadline, and for a caller who has gone."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.catalogue.records import Limits
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1 import inference_pb2, inference_pb2_grpc
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, MESSAGES, post
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway, until
from tests.integration.gateway.test_kserve import request_of
from tests.unit.gateway.gateway_world import catalogue, llm_model

METADATA = (("authorization", f"Bearer {KEYS['t1']}"),)
A_MINUTE = 60  # requests: one more has room every second


async def test_the_official_client_waits_as_told_and_succeeds(
    nats_url: str, redis_url: str, tmp_path: Path, node: FakeNode
) -> None:
    """Case B12: 60 a minute are used up: 429 with a whole number of seconds from 1 to 60. The official client, allowed
    one retry, waits that long by itself and has its answer: at most two requests."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    declared = catalogue(model, limits=Limits(requests_per_minute=A_MINUTE))
    statuses: list[int] = []

    async def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)

    async with (
        running_gateway(nats_url, redis_url, declared, node=node) as gateway,
        httpx.AsyncClient(event_hooks={"response": [note]}) as http_client,
        gateway.client() as plain,
        AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=KEYS["t1"], max_retries=1, timeout=60, http_client=http_client
        ) as client,
    ):
        one: Any = {**CHAT, "max_tokens": 1}
        while (refused := await plain.post("/v1/chat/completions", json=one)).status_code == 200:
            pass
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "tok0 "
    assert statuses in ([429, 200], [200])  # the latter where a busy machine took the second to get here


@pytest.fixture
async def channel(gateway: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    """To the gateway's gRPC port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as opened:
        yield opened


async def test_a_deadline_goes_all_the_way_to_the_engine(
    gateway: RunningGateway, node: FakeNode, channel: grpc.aio.Channel
) -> None:
    """30 s by header, 20 s by gRPC's own deadline: the scheduler is told that time, and the node gets no more than what
    is left of it. Without either it is the gateway's own 120 s."""
    await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1}, **{"x-request-deadline-ms": "30000"})
    generate = inference_pb2.GenerateRequest(model="m", text="hi")
    generate.sampling.max_tokens = 1
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    assert [reply async for reply in stub.Generate(generate, metadata=METADATA, timeout=20)]
    await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert [1 <= told <= most for told, most in zip(node.timeouts_ms, (30_000, 20_000, 120_000), strict=True)] == [
        True
    ] * 3
    ends = [each.deadline_unix_ms for each in gateway.scheduler.submitted]
    assert ends[1] < ends[0] < ends[2]


async def test_a_caller_who_leaves_a_stream_of_inferences_ends_the_one_that_runs(
    gateway: RunningGateway, node: FakeNode, channel: grpc.aio.Channel
) -> None:
    """Case B32 (a) for `ModelStreamInfer`: one answered, one running, then the call is cancelled."""
    stub: Any = kserve_grpc.GRPCInferenceServiceStub(channel)
    call = stub.ModelStreamInfer(metadata=METADATA)
    await call.write(request_of())
    assert (await call.read()).infer_response.id == "mine"
    node.hang_after = 0
    await call.write(request_of())
    await until(lambda: len(node.calls) == 2)
    call.cancel()
    first, second = await gateway.usage(2)
    assert Outcome.from_wire(first.data.outcome) is Outcome.DONE
    assert Outcome.from_wire(second.data.outcome) is Outcome.CANCELLED

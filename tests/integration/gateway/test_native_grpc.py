"""`roundhouse.v1.Inference` over real NATS and Valkey and a node of the test's own."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from roundhouse.catalogue.records import Limits
from roundhouse.errors import EngineFailed
from roundhouse.vocabulary import ModelName, Outcome
from roundhouse.wire.v1 import inference_pb2 as wire
from roundhouse.wire.v1 import inference_pb2_grpc, scheduling_pb2
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, until
from tests.unit.gateway.gateway_world import catalogue

KEY = (("authorization", f"Bearer {KEYS['t1']}"),)
CHAT = wire.Chat(messages=[wire.ChatMessage(role="user", content="hi")])


@pytest.fixture
async def channel(gateway: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the gateway's gRPC port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    """The service as a tenant's program sees it."""
    return inference_pb2_grpc.InferenceStub(channel)


def chat(**sampling: Any) -> wire.GenerateRequest:
    """A chat with the model `m`; its prompt is 4 tokens."""
    return wire.GenerateRequest(model="m", chat=CHAT, sampling=wire.SamplingOptions(**sampling))


async def failed(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (kinds_of(call) if hasattr(call, "__aiter__") else call)
    return raised.value


async def kinds_of(call: Any, into: list[str] | None = None) -> list[str]:
    """The kind of each message of a stream; `into` keeps them when the stream fails."""
    kinds = [] if into is None else into
    async for message in call:
        kinds.append(message.WhichOneof("event"))
    return kinds


async def test_a_generation_is_pieces_and_an_end_that_equals_the_bill(gateway: RunningGateway, stub: Any) -> None:
    """Invariant 13: three pieces, then usage 4 + 3, as in the usage event; the request id is in the metadata too."""
    call = stub.Generate(chat(max_tokens=3), metadata=KEY)
    messages = [message async for message in call]
    pieces = [message.piece for message in messages[:-1]]
    assert [piece.text for piece in pieces] == ["tok0 ", "tok1 ", "tok2 "]
    assert [piece.finish_reason for piece in pieces] == ["", "", "length"]
    ended = messages[-1].ended
    [event] = await gateway.usage(1)
    assert (ended.usage.input_tokens, ended.usage.output_tokens) == (4, 3)
    assert (event.data.input_tokens, event.data.output_tokens, event.data.operation) == (4, 3, "chat")
    metadata = dict(await call.initial_metadata())
    assert ended.request_id == event.data.request_id == metadata["x-request-id"]


@pytest.mark.parametrize(
    "given", [{"text": "hello"}, {"token_ids": wire.TokenIds(ids=[104, 101, 108, 108, 111])}], ids=["text", "tokens"]
)
async def test_a_bare_prompt_is_text_or_tokens(gateway: RunningGateway, stub: Any, given: dict[str, Any]) -> None:
    """Five bytes are five tokens either way; two seeded choices come with their logprobs."""
    request = wire.GenerateRequest(
        model="m",
        sampling=wire.SamplingOptions(n=2, max_tokens=2, seed=7),
        return_logprobs=True,
        top_logprobs=1,
        **given,
    )
    messages = [message async for message in stub.Generate(request, metadata=KEY)]
    pieces = [message.piece for message in messages[:-1]]
    assert sorted(piece.index for piece in pieces) == [0, 0, 1, 1]
    assert all(piece.logprobs[0].token_bytes.decode() == piece.text for piece in pieces)
    assert all(len(piece.logprobs[0].top) == 1 for piece in pieces)
    assert (messages[-1].ended.usage.input_tokens, messages[-1].ended.usage.output_tokens) == (5, 4)


async def test_embeddings_come_in_the_order_of_their_inputs(gateway: RunningGateway, stub: Any) -> None:
    """Two texts, two vectors, and the tokens of both on the bill."""
    inputs = [wire.EmbedInput(text="ab"), wire.EmbedInput(text="cde")]
    reply = await stub.Embed(wire.EmbedRequest(model="m", inputs=inputs), metadata=KEY)
    assert [list(one.values) for one in reply.embeddings] == [[0.5, -0.25, 1.0]] * 2
    assert reply.usage.input_tokens == 5
    [event] = await gateway.usage(1)
    assert (event.data.operation, event.data.input_tokens) == ("embedding", 5)


async def test_the_list_of_models_is_the_tenants(stub: Any) -> None:
    """Names, how they are called, and the base of an adapter."""
    cards = (await stub.ListModels(wire.ListModelsRequest(), metadata=KEY)).models
    assert [(card.name, card.base, card.interface, card.context_tokens) for card in cards] == [
        ("m", "", "llm", 512),
        ("scorer", "", "tensors", 0),
        ("tuned", "m", "llm", 512),
    ]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (wire.GenerateRequest(model="absent", chat=CHAT), grpc.StatusCode.NOT_FOUND),
        (wire.GenerateRequest(model="m"), grpc.StatusCode.INVALID_ARGUMENT),
        (wire.GenerateRequest(model="scorer", text="x"), grpc.StatusCode.INVALID_ARGUMENT),
        (wire.GenerateRequest(model="m", text="x" * 600), grpc.StatusCode.INVALID_ARGUMENT),
        (wire.GenerateRequest(model="m", token_ids=wire.TokenIds(ids=[2**31])), grpc.StatusCode.INVALID_ARGUMENT),
        (chat(temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT),
        (chat(max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT),
        (chat(n=1000), grpc.StatusCode.INVALID_ARGUMENT),
        (chat(logit_bias={99_999_999: 5}), grpc.StatusCode.INVALID_ARGUMENT),
        (
            wire.GenerateRequest(model="m", chat=wire.Chat(messages=CHAT.messages, tools_json="{")),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_a_wrong_request_costs_nothing(
    gateway: RunningGateway, node: FakeNode, stub: Any, request_: Any, code: grpc.StatusCode
) -> None:
    """Cases B04 and B41: the status a client can act on, nothing submitted, no engine call."""
    assert (await failed(stub.Generate(request_, metadata=KEY))).code() is code
    assert gateway.scheduler.submitted == []
    assert node.calls == []


async def test_every_method_needs_a_key(gateway: RunningGateway, node: FakeNode, stub: Any) -> None:
    """Case B05: without a key, and with a wrong one, UNAUTHENTICATED, and nothing reaches an engine."""
    for metadata in (None, (("authorization", "Bearer rh-wrong"),)):
        for call in (
            stub.Generate(chat(), metadata=metadata),
            stub.Embed(wire.EmbedRequest(model="m"), metadata=metadata),
            stub.ListModels(wire.ListModelsRequest(), metadata=metadata),
        ):
            assert (await failed(call)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert node.calls == []


async def test_a_cancelled_call_stops_the_engine_and_bills_what_came(
    gateway: RunningGateway, node: FakeNode, stub: Any
) -> None:
    """Case B35: after 3 pieces of 400 the caller cancels: one cancelled event, no engine stream is left."""
    node.interval_ms = 20
    call = stub.Generate(chat(max_tokens=400), metadata=KEY)
    seen = 0
    async for _ in call:
        seen += 1
        if seen == 3:
            break
    call.cancel()
    [event] = await gateway.usage(1)
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED
    assert 3 <= event.data.output_tokens < 100
    await until(lambda: node.open_streams == 0)


async def test_a_deadline_in_the_queue_ends_the_call(gateway: RunningGateway, node: FakeNode, stub: Any) -> None:
    """Case B14: gRPC's own deadline of 1 s and the header's both give DEADLINE_EXCEEDED; 0 tokens, no engine call."""
    gateway.scheduler.grants_at_once = False
    began = time.monotonic()
    own = await failed(stub.Generate(chat(), metadata=KEY, timeout=1))
    told = await failed(stub.Generate(chat(), metadata=(*KEY, ("x-request-deadline-ms", "1000"))))
    assert time.monotonic() - began < 30
    assert (own.code(), told.code()) == (grpc.StatusCode.DEADLINE_EXCEEDED,) * 2
    events = await gateway.usage(2)
    assert [(event.data.input_tokens, event.data.output_tokens) for event in events] == [(0, 0)] * 2
    assert node.calls == []


async def test_waiting_is_told(gateway: RunningGateway, stub: Any) -> None:
    """A call in the queue hears that it waits, and for what, before anything else."""
    gateway.scheduler.grants_at_once = False
    gateway.scheduler.accepted = scheduling_pb2.Accepted(position=3, estimated_wait_ms=60_000, cold=True)
    call = stub.Generate(chat(max_tokens=1), metadata=KEY)
    messages = aiter(call)
    first = await asyncio.wait_for(anext(messages), 30)
    assert (first.waiting.stage, first.waiting.position) == ("loading", 3)
    assert first.waiting.estimated_ms > 0
    await gateway.scheduler.grant(gateway.scheduler.submitted[0])
    assert (await kinds_of(messages))[-1] == "ended"


async def test_a_limit_is_told_with_its_delay(gateway: RunningGateway, stub: Any) -> None:
    """Case B12: RESOURCE_EXHAUSTED carries RetryInfo; before it the metadata said what was left."""
    model = gateway.catalogue.current.models[ModelName("m")]
    gateway.catalogue.replace(catalogue(model, limits=Limits(requests_per_minute=1)))
    call = stub.Generate(chat(max_tokens=1), metadata=KEY)
    assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
    assert len([message async for message in call]) == 2
    refused = await failed(stub.Generate(chat(max_tokens=1), metadata=KEY))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    [detail] = rpc_status.from_call(refused).details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    assert 0 < info.retry_delay.ToMilliseconds() <= 60_000


async def test_an_engine_that_fails_is_unavailable_after_its_pieces(
    gateway: RunningGateway, node: FakeNode, stub: Any
) -> None:
    """Case B29: two pieces, no end message, and a status that says so; the bill is 4 + 2."""
    node.names_tokens = False  # so that no other attempt goes on
    node.fail_after, node.failure = 2, EngineFailed("The engine failed while it ran the request.")
    call = stub.Generate(chat(max_tokens=5), metadata=KEY)
    kinds: list[str] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await kinds_of(call, kinds)
    assert kinds == ["piece", "piece"]
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    [event] = await gateway.usage(1)
    assert (event.data.input_tokens, event.data.output_tokens) == (4, 2)


async def test_a_fault_of_ours_quotes_nothing(gateway: RunningGateway, node: FakeNode, stub: Any) -> None:
    """Invariant 16: an unexpected exception is INTERNAL without its text, which may hold a prompt."""
    node.fail_after, node.failure = 0, ValueError("the prompt was: hi")  # type: ignore[assignment]
    error = await failed(stub.Generate(chat(max_tokens=1), metadata=KEY))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "prompt" not in (error.details() or "")


async def test_reflection_and_health_name_the_services(channel: grpc.aio.Channel) -> None:
    """Both are public: they say no more than the published protocol and that the process lives."""
    health = health_pb2_grpc.HealthStub(channel)
    reply = await health.Check(health_pb2.HealthCheckRequest(service="roundhouse.v1.Inference"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    [answer] = [message async for message in call]
    names = {service.name for service in answer.list_services_response.service}
    assert {"roundhouse.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names

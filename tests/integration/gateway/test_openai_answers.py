"""The OpenAI API of a gateway over real NATS and Valkey: what is asked and what is answered."""

import base64
import json
import struct

import msgspec
import pytest

from roundhouse.block_keys import tenant_salt
from roundhouse.vocabulary import ModelName, PriorityClass
from services.gateway.ports import EngineRequest
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, MESSAGES, chunks_of, post
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model


async def test_a_streamed_chat_has_the_events_that_clients_expect(gateway: RunningGateway) -> None:
    """Role, deltas, finish, a comment with the times, [DONE]; one id on all."""
    body = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 2}
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    chunks = chunks_of(answer.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "tok0 "}, {"content": "tok1 "}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert ": roundhouse queue_ms=1 stage_ms=0 load_ms=0 first_token_ms=" in answer.text
    [event] = await gateway.usage(1)
    assert event.data.output_tokens == 2
    assert answer.headers["x-request-id"] == event.data.request_id


async def test_a_whole_chat_has_text_usage_and_times(gateway: RunningGateway) -> None:
    """The prompt is `<|user|>hi<|assistant|>`: two special tokens and two bytes, so 4 + 3 tokens."""
    answer = await post(gateway, "/v1/chat/completions", {"model": "m", "messages": MESSAGES, "max_tokens": 3})
    body = answer.json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "tok0 tok1 tok2 ", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 3)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert answer.headers["x-roundhouse-queue-ms"] == "1"
    [event] = await gateway.usage(1)
    assert (event.data.input_tokens, event.data.output_tokens, event.data.operation) == (4, 3, "chat")


NULLS = {
    "max_tokens": None,
    "max_completion_tokens": None,
    "stop": None,
    "temperature": None,
    "n": None,
    "logit_bias": None,
    "stream": None,
    "response_format": None,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hi"}),
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES}),
    ],
)
async def test_explicit_nulls_count_as_absent(gateway: RunningGateway, path: str, body: dict[str, object]) -> None:
    """Case B02: status, text, usage and reservation are those of the request without the keys."""
    plain = await post(gateway, path, body)
    nulled = await post(gateway, path, {**body, **NULLS})
    assert plain.status_code == nulled.status_code == 200
    assert plain.json()["choices"] == nulled.json()["choices"]
    assert plain.json()["usage"] == nulled.json()["usage"]
    first, second = gateway.scheduler.submitted
    assert first.max_output_tokens == second.max_output_tokens > 0


@pytest.mark.parametrize(
    ("options", "with_usage"), [({}, 0), ({"stream_options": {}}, 0), ({"stream_options": {"include_usage": False}}, 0)]
)
async def test_usage_appears_in_a_stream_only_when_asked_for(
    gateway: RunningGateway, options: dict[str, object], with_usage: int
) -> None:
    """Case B03: without `include_usage` no chunk has usage."""
    body = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 2, **options}
    chunks = chunks_of((await post(gateway, "/v1/chat/completions", body)).text)
    assert len([chunk for chunk in chunks if chunk.get("usage")]) == with_usage
    assert all("usage" not in chunk for chunk in chunks)


async def test_the_usage_chunk_is_the_last_and_equals_the_event(gateway: RunningGateway) -> None:
    """Case B03: one chunk has usage, with no choices, right before [DONE]; all others have null."""
    body = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 2}
    answer = await post(gateway, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    *others, last = chunks_of(answer.text)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    [event] = await gateway.usage(1)
    assert last["usage"]["prompt_tokens"] == event.data.input_tokens == 4
    assert last["usage"]["completion_tokens"] == event.data.output_tokens == 2


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),  # case B03: without stream
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": "two"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"model": None}, "model"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ],
)
async def test_a_wrong_parameter_is_named_and_costs_nothing(
    gateway: RunningGateway, node: FakeNode, wish: dict[str, object], param: str
) -> None:
    """Case B41: 400 with its `param`, nothing submitted, no engine call; the next request of another tenant is 200."""
    answer = await post(gateway, "/v1/chat/completions", {**CHAT, **wish})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert gateway.scheduler.submitted == []
    assert node.calls == []
    async with gateway.client("t2") as client:
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})).status_code == 200


async def test_a_prompt_that_can_never_fit_is_refused_before_the_queue(gateway: RunningGateway) -> None:
    """Case B13: context 512; 513 tokens are too many, and so are 4 with room for 509 only; nothing is queued."""
    too_long = await post(gateway, "/v1/completions", {"model": "m", "prompt": "x" * 513})
    too_much = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 509})
    for answer in (too_long, too_much):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert gateway.scheduler.submitted == []
    fits = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 508})
    assert fits.status_code == 200


async def test_the_kv_pool_bounds_the_window_too(gateway: RunningGateway) -> None:
    """Case B13: legal by the context of 512 but bigger than a pool of 64 tokens."""
    model = gateway.catalogue.current.models[ModelName("m")]
    gateway.catalogue.replace(catalogue(msgspec.structs.replace(model, kv_pool_tokens=64)))
    answer = await post(gateway, "/v1/completions", {"model": "m", "prompt": "x" * 100})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_only_the_key_names_the_tenant(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B07: body, metadata and headers that say t2 change nothing: event, queue and cache space say t1."""
    body = {**CHAT, "max_tokens": 1, "user": "t2", "tenant_id": "t2", "metadata": {"tenant": "t2", "tenant_id": "t2"}}
    assert (await post(gateway, "/v1/chat/completions", body, **{"x-tenant-id": "t2"})).status_code == 200
    [event] = await gateway.usage(1)
    assert (event.subject, event.data.key_id) == ("t1", "key-t1")
    assert gateway.scheduler.submitted[0].tenant_id == "t1"
    [call] = node.calls
    assert isinstance(call, EngineRequest)
    assert call.salt == tenant_salt("c", "t1").hex()


@pytest.mark.parametrize(("format_", "shape"), [(None, list), ("float", list), ("base64", str)])
async def test_embeddings_are_numbers_or_base64_of_the_same_numbers(
    gateway: RunningGateway, node: FakeNode, format_: str | None, shape: type
) -> None:
    """Case B01: base64 is the little-endian float32 of the vector, 4 bytes a dimension; absent means numbers."""
    body = {"model": "m", "input": ["a b c", "d"], "encoding_format": format_}
    answer = await post(gateway, "/v1/embeddings", body)
    vectors = [entry["embedding"] for entry in answer.json()["data"]]
    assert [type(vector) for vector in vectors] == [shape, shape]
    if shape is str:
        raw = base64.b64decode(vectors[0])
        assert len(raw) == 4 * 3
        vectors[0] = list(struct.unpack("<3f", raw))
    assert tuple(vectors[0]) == node.embedding
    [event] = await gateway.usage(1)
    assert event.data.input_tokens == answer.json()["usage"]["prompt_tokens"] == 5 + 1


async def test_an_unknown_encoding_is_refused(gateway: RunningGateway) -> None:
    """Case B01: `hex` is 400 with its param."""
    answer = await post(gateway, "/v1/embeddings", {"model": "m", "input": "a", "encoding_format": "hex"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "encoding_format")


async def test_prompts_and_choices_of_a_completion(gateway: RunningGateway, node: FakeNode) -> None:
    """Two prompts with two choices each: four answers, prompts billed once, seeds that differ, echo in front."""
    body = {"model": "m", "prompt": ["ab", "abc"], "n": 2, "max_tokens": 2, "seed": 7, "echo": True}
    answer = (await post(gateway, "/v1/completions", body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["text"] == "abtok0 tok1 "
    assert answer["usage"]["prompt_tokens"] == 2 + 3
    assert answer["usage"]["completion_tokens"] == 4 * 2
    seeds = [json.loads(call.sampling_parameters)["seed"] for call in node.calls if isinstance(call, EngineRequest)]
    assert sorted(seeds) == [7, 7, 8, 8]
    assert len(gateway.scheduler.submitted) == 1


async def test_logprobs_have_the_shape_of_each_api(gateway: RunningGateway) -> None:
    """Chat: content entries with alternatives; completions: parallel lists with offsets."""
    chat = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 1})
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["tok0 ", "tok1 "]
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5
    body = {"model": "m", "prompt": "x", "max_tokens": 2, "logprobs": 1}
    shaped = (await post(gateway, "/v1/completions", body)).json()["choices"][0]["logprobs"]
    assert shaped["tokens"] == ["tok0 ", "tok1 "]
    assert shaped["text_offset"] == [0, 5]


async def test_models_are_those_that_the_tenant_may_see(gateway: RunningGateway) -> None:
    """One text for what is not there and what is hidden; adapters are models too."""
    hidden = llm_model("secret", access=("t2",), tokenizer_path="")
    model = gateway.catalogue.current.models[ModelName("m")]
    gateway.catalogue.replace(catalogue(model, hidden))
    async with gateway.client() as client:
        listed = [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["m", "tuned"]
        assert (await client.get("/v1/models/m")).json()["id"] == "m"
        texts = []
        for name in ("secret", "absent"):
            answer = await client.get(f"/v1/models/{name}")
            chat = await client.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert answer.status_code == chat.status_code == 404
            assert chat.json()["error"]["code"] == "model_not_found"
            texts.append(chat.json()["error"]["message"].replace(name, "X"))
        assert texts[0] == texts[1]


async def test_an_adapter_runs_on_its_base(gateway: RunningGateway, node: FakeNode) -> None:
    """The submit names base and adapter, the engine gets the adapter's digest, the answer the adapter's name."""
    answer = await post(gateway, "/v1/chat/completions", {**CHAT, "model": "tuned", "max_tokens": 1})
    assert answer.json()["model"] == "tuned"
    [submit] = gateway.scheduler.submitted
    assert (submit.model, submit.adapter) == ("m", "tuned")
    [call] = node.calls
    assert isinstance(call, EngineRequest)
    assert call.adapter_digest == submit.adapter_digest != ""


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, None),
        ("POST", "/v1/chat/completions", b"[1]", 400, None),
        ("POST", "/v1/chat/completions", b"\xff", 400, None),
        ("POST", "/v1/chat/completions", b"x" * 70_000, 413, "body_too_large"),
        ("GET", "/v1/chat/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/nothing", b"{}", 404, "unknown_url"),
    ],
)
async def test_what_is_no_request_has_the_error_shape_too(
    nats_url: str, redis_url: str, method: str, path: str, content: bytes, status: int, code: str | None
) -> None:
    """Every refusal is an OpenAI error object with a request id."""
    async with (
        running_gateway(nats_url, redis_url, catalogue(), node=FakeNode(), body_bytes_max=65_536) as gateway,
        gateway.client() as client,
    ):
        answer = await client.request(method, path, content=content)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(("tier", "expected"), [("flex", "batch"), ("auto", "standard"), ("priority", "standard")])
async def test_a_caller_may_choose_to_wait_but_not_to_get_ahead(
    gateway: RunningGateway, tier: str, expected: str
) -> None:
    """`flex` runs and is billed in the batch class; no tier makes a request more urgent than its tenant."""
    answer = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1, "service_tier": tier})
    assert answer.status_code == 200
    [request] = gateway.scheduler.submitted
    [event] = await gateway.usage(1)
    assert PriorityClass.from_wire(request.priority_class) == PriorityClass.from_wire(event.data.priority_class)
    assert PriorityClass.from_wire(request.priority_class) == expected

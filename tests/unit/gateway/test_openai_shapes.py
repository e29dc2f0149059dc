"""The wire form of OpenAI answers and errors."""

import json
from typing import Any

import pytest

from roundhouse.errors import (
    BudgetExhausted,
    CapacityExhausted,
    Conflict,
    DeadlinePassed,
    EngineFailed,
    Forbidden,
    InvalidInput,
    LimitExceeded,
    NotFound,
    RoundhouseError,
    Unauthenticated,
    Unavailable,
)
from services.gateway.adapters.http_errors import BodyTooLarge, WrongMethod, error_response
from services.gateway.adapters.rate_headers import duration_text
from services.gateway.domain.context_window import output_limit
from services.gateway.domain.openai_chunks import (
    ChunkWriter,
    comment,
    completion_logprobs,
    joined_logprobs,
)
from tests.unit.gateway.gateway_world import llm_model


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON of one event, which must be one line of valid UTF-8."""
    text = data.decode()
    assert text.startswith("data: ")
    assert text.endswith("\n\n")
    assert "\n" not in text[:-2]
    value: dict[str, Any] = json.loads(text[6:])
    return value


@pytest.mark.parametrize("text", ["plain", 'quo"te', "new\nline", "ď🌍你", "\u2028", "\\", ""])
@pytest.mark.parametrize("chat", [True, False])
def test_text_of_any_kind_stays_one_valid_line(text: str, chat: bool) -> None:
    """Case B31: every event is valid UTF-8 on one line, and the text comes back equal."""
    writer = ChunkWriter(chat=chat, request_id="r", created_s=1, model='m"odel', with_usage=False)
    [choice] = parsed(writer.text(3, text))["choices"]
    assert choice["index"] == 3
    assert (choice["delta"]["content"] if chat else choice["text"]) == text
    assert choice["finish_reason"] is None


def test_the_events_of_a_chat_stream() -> None:
    """Role, text, finish and usage share id, object, created and model."""
    writer = ChunkWriter(chat=True, request_id="r", created_s=1, model="m", with_usage=True)
    events = [writer.role(0), writer.text(0, "a"), writer.finish(0, "stop"), writer.usage({"total_tokens": 3})]
    values = [parsed(event) for event in events]
    head = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    assert all(value.items() >= head.items() for value in values)
    assert [value["usage"] for value in values] == [None, None, None, {"total_tokens": 3}]
    assert values[2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_a_comment_is_no_event() -> None:
    """Clients ignore lines that begin with a colon."""
    assert comment("waiting") == b": waiting\n\n"


def test_logprobs_of_pieces_join_to_those_of_the_whole() -> None:
    """Lists are put one after the other; offsets go on."""
    entry = '[{{"id":1,"token":"{0}","bytes":[97],"logprob":-1.0,"top":[]}}]'
    parts = [completion_logprobs(entry.format("ab"), 0), completion_logprobs(entry.format("c"), 2)]
    assert joined_logprobs(parts) == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 2],
    }
    assert joined_logprobs([]) is None


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (InvalidInput("x", param="n"), 400, "invalid_request_error", None, None),
        (BodyTooLarge("x", code="body_too_large"), 413, "invalid_request_error", "body_too_large", None),
        (WrongMethod("x"), 405, "invalid_request_error", "method_not_allowed", None),
        (Unauthenticated("x"), 401, "invalid_request_error", "invalid_api_key", None),
        (Forbidden("x"), 403, "permission_error", "permission_denied", None),
        (NotFound("x"), 404, "invalid_request_error", "model_not_found", None),
        (Conflict("x"), 409, "conflict_error", "conflict", None),
        (LimitExceeded("x", retry_after_ms=1), 429, "rate_limit_error", "rate_limit_exceeded", "1"),
        (LimitExceeded("x", retry_after_ms=1_001), 429, "rate_limit_error", "rate_limit_exceeded", "2"),
        (BudgetExhausted("x", retry_after_ms=5), 429, "insufficient_quota", "insufficient_quota", None),
        (CapacityExhausted("x", retry_after_ms=900), 503, "service_unavailable_error", "server_is_overloaded", "1"),
        (Unavailable("x"), 503, "service_unavailable_error", "unavailable", None),
        (DeadlinePassed("x"), 504, "timeout_error", "deadline_exceeded", None),
        (EngineFailed("x"), 502, "server_error", "engine_error", None),
        (RoundhouseError("x"), 500, "server_error", None, None),
    ],
)
def test_errors_as_clients_read_them(
    error: RoundhouseError, status: int, kind: str, code: str | None, retry_after: str | None
) -> None:
    """Status, type, code and delay of every error; under /v2 the body is only the text."""
    answer = error_response(error, "/v1/x")
    body = json.loads(bytes(answer.body))["error"]
    assert (answer.status_code, body["type"], body["code"], body["param"]) == (status, kind, code, error.param)
    assert answer.headers.get("retry-after") == retry_after
    assert answer.headers.get("x-should-retry") == ("false" if isinstance(error, BudgetExhausted) else None)
    assert json.loads(bytes(error_response(error, "/v2/x").body)) == {"error": "x"}


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(12, "12ms"), (-1, "0ms"), (1_500, "1.5s"), (360_000, "6m0s"), (61_250, "1m1.25s")]
)
def test_durations_as_openai_writes_them(milliseconds: int, text: str) -> None:
    """Milliseconds, seconds, minutes."""
    assert duration_text(milliseconds) == text


@pytest.mark.parametrize(
    ("context", "pool", "prompt", "asked", "limit"),
    [
        (512, 0, 12, None, 100),  # the default fits
        (64, 0, 12, None, 52),  # the window has room for 52
        (512, 64, 12, None, 52),  # the KV pool is the smaller window
        (512, 0, 12, 500, 500),
        (0, 0, 12, 900, 900),  # a model that states no limit
    ],
)
def test_what_an_answer_may_have(context: int, pool: int, prompt: int, asked: int | None, limit: int) -> None:
    """Case B13, what fits: what was asked, else the default of 100 as far as there is room."""
    model = llm_model(context_tokens=context, kv_pool_tokens=pool)
    assert output_limit(model, prompt_tokens=prompt, asked=asked, default=100, param="prompt") == limit


@pytest.mark.parametrize(
    ("context", "pool", "prompt", "asked"),
    [(512, 0, 513, None), (512, 0, 512, None), (512, 0, 12, 501), (512, 64, 64, 1)],
)
def test_what_can_never_fit(context: int, pool: int, prompt: int, asked: int | None) -> None:
    """Case B13: refused with `context_length_exceeded`."""
    model = llm_model(context_tokens=context, kv_pool_tokens=pool)
    with pytest.raises(InvalidInput) as refused:
        output_limit(model, prompt_tokens=prompt, asked=asked, default=100, param="prompt")
    assert refused.value.code == "context_length_exceeded"

"""The trace of a request: the caller's trace goes on, through the gateway's spans, to scheduler and engine."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from roundhouse import telemetry
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, post
from tests.integration.gateway.running_gateway import RunningGateway, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Every span that ends in this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """Ended spans of one name."""
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def test_a_request_is_a_server_span_and_an_operation(
    gateway: RunningGateway, spans: InMemorySpanExporter
) -> None:
    """Both belong to the caller's trace; the operation has the GenAI attributes and no text of the prompt."""
    own = {"x-request-id": "client-" + "7" * 200}
    answer = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 2}, traceparent=PARENT, **own)
    assert "client" not in answer.headers["x-request-id"]
    await until(lambda: bool(named(spans, "POST /v1/chat/completions")))
    [server] = named(spans, "POST /v1/chat/completions")
    [chat] = named(spans, "chat m")
    assert server.kind is SpanKind.SERVER
    assert (server.attributes or {})["http.request.header.x-request-id"] == ("client-" + "7" * 200)[:128]
    assert server.parent is not None
    assert f"{server.parent.trace_id:032x}" == TRACE
    assert chat.parent is not None
    assert chat.parent.span_id == server.context.span_id
    assert dict(chat.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "roundhouse",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
    }


async def test_a_failure_is_named_in_the_operation(
    gateway: RunningGateway, spans: InMemorySpanExporter, node: FakeNode
) -> None:
    """Invariant 16: the error's code is told, not its text."""
    node.names_tokens, node.fail_after = False, 1
    await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
    await until(lambda: bool(named(spans, "chat m")))
    [chat] = named(spans, "chat m")
    assert (chat.attributes or {})["error.type"] == "engine_error"
    assert chat.events == ()
    assert (chat.status.status_code, chat.status.description) == (StatusCode.ERROR, None)

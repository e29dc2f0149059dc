"""Spans of calls and messages: what ended them is told, and nothing that a request said (invariant 16)."""

import asyncio
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from roundhouse import grpc_edge, telemetry
from roundhouse.errors import InvalidInput

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
PROMPT = "my secret prompt"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Every span that ends in this process."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer("test"))
    yield found
    provider.shutdown()


def all_of(span: ReadableSpan) -> str:
    """Everything that is exported of a span."""
    return repr(
        (span.name, dict(span.attributes or {}), span.status.description, [vars(event) for event in span.events])
    )


class Call:
    """The server's side of a call: aborting raises, as gRPC's own does."""

    async def abort_with_status(self, _status: Any) -> NoReturn:
        raise grpc.aio.AbortError("Locally aborted.")


@pytest.mark.parametrize("headers", [{}, PARENT])
@pytest.mark.parametrize("fault", [ValueError(f"cannot read {PROMPT!r}"), InvalidInput(f"no such stop in {PROMPT!r}")])
async def test_a_call_that_fails_leaves_no_text_in_its_span(
    exporter: InMemorySpanExporter, headers: dict[str, str], fault: Exception
) -> None:
    """A handler's fault quotes the prompt: its span is in error, and neither text nor stack trace is in it."""

    async def failing(_request: Any, _context: Any) -> NoReturn:
        raise fault

    with pytest.raises(grpc.aio.AbortError):
        await grpc_edge._wrap_unary(failing, "/roundhouse.v1.Inference/Embed", headers)(None, Call())
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert PROMPT not in all_of(span)


async def test_a_call_that_is_cancelled_is_no_error(exporter: InMemorySpanExporter) -> None:
    """Its caller has left: that is no fault of ours."""

    async def left(_request: Any, _context: Any) -> NoReturn:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await grpc_edge._wrap_unary(left, "/roundhouse.v1.Inference/Embed", {})(None, Call())
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.UNSET

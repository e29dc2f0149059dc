"""One span a request: a child of the caller's, with counts and outcome, and never with text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engines.reference import tracing

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_span_continues_the_caller_s_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, parent, outcome and counts; nothing else but the model and the request id."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(tracing, "open_provider", lambda: provider)
    tracer = tracing.RequestTracer("base-s")
    span = tracer.begin("r1", f"00-{TRACE_ID}-{SPAN_ID}-01")
    span.end("stop", prompt_tokens=7, output_tokens=3)
    tracer.close()
    (finished,) = exporter.get_finished_spans()
    assert finished.name == "engine.generate"
    assert finished.start_time == span.begun_ns
    assert finished.context.trace_id == int(TRACE_ID, 16)
    assert finished.parent is not None
    assert finished.parent.span_id == int(SPAN_ID, 16)
    assert dict(finished.attributes or {}) == {
        "gen_ai.request.model": "base-s",
        "roundhouse.request_id": "r1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "roundhouse.outcome": "stop",
    }


def test_an_exporter_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a request returns at once, also when the queue is full; closing gives up at its limit."""
    never = Event()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(tracing, "open_provider", never.wait)
    monkeypatch.setattr(tracing, "CLOSE_LIMIT_S", 0.01)
    tracer = tracing.RequestTracer("base-s")
    for _ in range(tracing.SPANS_WAITING_MAX + 5):
        tracer.begin("r", "").end("stop", 1, 1)
    tracer.close()


def test_without_an_exporter_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold load does not pay for OpenTelemetry."""
    for name in tracing.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code = (
        "import sys; from engines.reference.tracing import RequestTracer;"
        "RequestTracer('m').begin('r', '').end('stop', 1, 1); print('opentelemetry' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"

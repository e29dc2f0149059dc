"""One OpenTelemetry span a request, when an exporter is configured. Prompts and texts are never put in it.

The endpoint's variables are read here and not by `roundhouse.environment`, whose imports would double the time of a
cold load.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RequestSpan(Protocol):
    """The span of one request."""

    def end(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """Close the span with how the request ended and what it consumed."""
        ...


class NoSpan:
    """Tracing is off."""

    def end(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing to close."""


class _OpenSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "roundhouse.outcome": outcome,
            }
        )
        self._span.end()


class RequestTracer:
    """Opens spans named `engine.generate`, as children of the caller's `traceparent`."""

    def __init__(self, model: str) -> None:
        """Imports OpenTelemetry only when one of `ENDPOINT_VARIABLES` is set: it would slow every cold load."""
        self._model = model
        self._tracer = open_tracer() if any(os.environ.get(name) for name in ENDPOINT_VARIABLES) else None

    def begin(self, request_id: str, traceparent: str) -> RequestSpan:
        """Open the span of one request."""
        if self._tracer is None:
            return NoSpan()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
        attributes = {"gen_ai.request.model": self._model, "roundhouse.request_id": request_id}
        return _OpenSpan(self._tracer.start_span("engine.generate", context=parent, attributes=attributes))

    def close(self) -> None:
        """Send what is buffered."""
        if self._tracer is not None:
            from opentelemetry import trace

            shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
            if shutdown is not None:
                shutdown()


def open_tracer() -> Tracer:
    """A tracer that exports over OTLP."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "roundhouse-engine"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("engines.reference")

"""One OpenTelemetry span a request, when an exporter is configured. Prompts and texts are never put in it.

Importing OpenTelemetry and its exporter takes longer than loading a small model, so a thread of its own does it, and
turns what was recorded about ended requests into spans: neither a cold load nor a reply waits for it. The endpoint's
variables are read here and not by `roundhouse.environment`, whose imports are slow as well.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SPANS_WAITING_MAX = 2048  # as OpenTelemetry's own batch processor
CLOSE_LIMIT_S = 2.0  # an exporter that cannot be reached must not hold up an unload


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What a span is made of; times in nanoseconds since the epoch."""

    request_id: str
    traceparent: str
    begun_ns: int
    ended_ns: int
    outcome: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The span of a request that is running; `records` None means that tracing is off."""

    records: Queue[EndedRequest | None] | None
    request_id: str
    traceparent: str
    begun_ns: int

    def end(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """Record how the request ended and what it consumed. Never waits: with a full queue the span is lost."""
        if self.records is None:
            return
        ended_ns = time.time_ns()
        ended = EndedRequest(
            self.request_id, self.traceparent, self.begun_ns, ended_ns, outcome, prompt_tokens, output_tokens
        )
        with suppress(Full):
            self.records.put_nowait(ended)


class RequestTracer:
    """Opens spans named `engine.generate`, as children of the caller's `traceparent`."""

    def __init__(self, model: str) -> None:
        """Starts its thread only when one of `ENDPOINT_VARIABLES` is set."""
        self._model = model
        self._records: Queue[EndedRequest | None] | None = None
        if any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
            self._records = Queue(SPANS_WAITING_MAX)
            self._thread = Thread(target=self._emit_forever, args=(self._records,), daemon=True)
            self._thread.start()

    def begin(self, request_id: str, traceparent: str) -> RequestSpan:
        """Open the span of one request."""
        return RequestSpan(self._records, request_id, traceparent, time.time_ns())

    def close(self) -> None:
        """Send what is recorded, for at most `CLOSE_LIMIT_S`."""
        if self._records is not None:
            with suppress(Full):
                self._records.put_nowait(None)
            self._thread.join(CLOSE_LIMIT_S)

    def _emit_forever(self, records: Queue[EndedRequest | None]) -> None:
        provider = open_provider()
        while (ended := records.get()) is not None:
            emit_span(provider, self._model, ended)
        provider.shutdown()


def emit_span(provider: TracerProvider, model: str, ended: EndedRequest) -> None:
    """Make the span of a request that has ended."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": ended.traceparent}) if ended.traceparent else None
    attributes: dict[str, str | int] = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "roundhouse.request_id": ended.request_id,
        "roundhouse.outcome": ended.outcome,
    }
    tracer = provider.get_tracer("engines.reference")
    span = tracer.start_span("engine.generate", context=parent, attributes=attributes, start_time=ended.begun_ns)
    span.end(ended.ended_ns)


def open_provider() -> TracerProvider:
    """A provider that exports over OTLP in batches."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "roundhouse-engine"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider

"""Logs, traces and metrics, set up the same way in every process.

Logs are JSON lines with a stable `event` name. Traces go to the OTLP endpoint that OpenTelemetry's own variables name;
without one no span is made, but an incoming `traceparent` still travels on. Metrics live in one registry a process.
Never a prompt, completion or key in any of them (invariant 16); labels only from the catalogue (invariant 17).
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from roundhouse.environment import ServiceSettings, otlp_endpoint

REGISTRY = CollectorRegistry(auto_describe=True)
"""Every metric of this process is registered here."""

tracer = trace.get_tracer("roundhouse")
_NO_SPAN = trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)
_idle_tracer = tracer  # while this one is in place, and nothing was installed behind it, spans go nowhere
_installed = False


def configure(service: str, settings: ServiceSettings) -> None:
    """Set up logs and traces for this process. Call once, first."""
    configure_logging(settings.log_level)
    structlog.contextvars.bind_contextvars(service=service, instance=settings.instance_id)
    if otlp_endpoint() is not None:
        # Imported here: a seventh of what a process without tracing would load before it starts.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        install_tracing(service, settings.instance_id, BatchSpanProcessor(OTLPSpanExporter()))


def configure_logging(level: str) -> None:
    """One JSON object a line on stdout, from structlog and from libraries that use `logging`."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        format='{"level":"%(levelname)s","event":"library","logger":"%(name)s","text":"%(message)s"}',
        level=max(number, logging.WARNING),
        stream=sys.stdout,
        force=True,
    )


def install_tracing(service: str, instance: str, processor: SpanProcessor) -> TracerProvider:
    """Send spans of this process to `processor`. Returns the provider, to be shut down at the end."""
    resource = Resource.create({"service.name": f"roundhouse-{service}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    global _installed
    _installed = True
    return provider


def shutdown() -> None:
    """Flush and end the exporter, if there is one."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def trace_headers() -> dict[str, str] | None:
    """The current trace context as headers (`traceparent`); None if there is none."""
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier or None


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current trace context as gRPC metadata."""
    return tuple((trace_headers() or {}).items())


def _records() -> bool:
    """Whether anybody gets spans; making them for nobody costs 15 microseconds each."""
    return _installed or tracer is not _idle_tracer


@contextmanager
def consumer_span(name: str, headers: Mapping[str, str]) -> Iterator[Span]:
    """A span for a received message or call, child of the sender's context in `headers`."""
    with continued_span(name, headers, SpanKind.CONSUMER) as span:
        yield span


@contextmanager
def continued_span(name: str, headers: Mapping[str, str], kind: SpanKind) -> Iterator[Span]:
    """A span whose parent is the remote context in `headers` (lower-case keys)."""
    if "traceparent" not in headers:
        if not _records():
            yield _NO_SPAN
            return
        with _span(name, kind) as span:
            yield span
        return
    token = otel_context.attach(propagate.extract(headers))
    try:
        with _span(name, kind) as span:
            yield span
    finally:
        otel_context.detach(token)


@contextmanager
def _span(name: str, kind: SpanKind) -> Iterator[Span]:
    """A span that says that it failed and not how: the text and the stack of an exception, and of those that it came
    from, may quote a request (invariant 16)."""
    with tracer.start_as_current_span(name, kind=kind, record_exception=False, set_status_on_exception=False) as span:
        try:
            yield span
        except Exception:
            span.set_status(StatusCode.ERROR)
            raise


@contextmanager
def inner_span(name: str) -> Iterator[Span]:
    """A span inside this process. Exceptions are not recorded: their texts may quote a prompt (invariant 16)."""
    if not _records():
        yield _NO_SPAN
        return
    with tracer.start_as_current_span(
        name, kind=SpanKind.INTERNAL, record_exception=False, set_status_on_exception=False
    ) as span:
        yield span

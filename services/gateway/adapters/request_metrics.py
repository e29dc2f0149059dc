"""`RequestObserver` as Prometheus metrics, with the names and buckets of OpenTelemetry's GenAI conventions.

Labels are operations, catalogue names and outcomes, never words of callers (invariant 17, case B45). Gauges are changed
where an object enters and leaves, so that every way out lowers them (case B46).
"""

from prometheus_client import Counter, Gauge, Histogram

from roundhouse.telemetry import REGISTRY
from services.gateway.ports import RequestEnded

# Source: OpenTelemetry semantic conventions for generative AI metrics, "explicit bucket boundaries".
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS = ("gen_ai_operation_name", "gen_ai_request_model")

_duration = Histogram(
    "gen_ai_server_request_duration_seconds",
    "Time from admission to the end of a request.",
    (*_LABELS, "error_type"),
    buckets=_DURATION_S,
    registry=REGISTRY,
)
_first_token = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "Time from submission to the first token.",
    _LABELS,
    buckets=_FIRST_TOKEN_S,
    registry=REGISTRY,
)
_per_token = Histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Time per output token after the first one.",
    _LABELS,
    buckets=_PER_TOKEN_S,
    registry=REGISTRY,
)
_started = Counter("roundhouse_gateway_requests_started", "Requests admitted.", _LABELS, registry=REGISTRY)
_ended = Counter(
    "roundhouse_gateway_requests_ended", "Admitted requests that ended.", (*_LABELS, "outcome"), registry=REGISTRY
)
_in_flight = Gauge("roundhouse_gateway_requests_in_flight", "Admitted requests that have not ended.", registry=REGISTRY)
_waiting = Gauge(
    "roundhouse_gateway_requests_waiting", "Requests that wait for a grant.", ("model",), registry=REGISTRY
)


class PrometheusObserver:
    """See the module."""

    def started(self, operation: str, model: str) -> None:
        """See `RequestObserver.started`."""
        _started.labels(operation, model).inc()
        _in_flight.inc()

    def queued(self, model: str, change: int) -> None:
        """See `RequestObserver.queued`."""
        _waiting.labels(model).inc(change)

    def ended(self, ended: RequestEnded) -> None:
        """See `RequestObserver.ended`."""
        _in_flight.dec()
        _ended.labels(ended.operation, ended.model, ended.outcome.value).inc()
        _duration.labels(ended.operation, ended.model, ended.error_type).observe(ended.total_ms / 1000)
        if ended.first_token_ms is None:
            return
        _first_token.labels(ended.operation, ended.model).observe(ended.first_token_ms / 1000)
        if ended.output_tokens > 1:
            rest_ms = ended.total_ms - ended.first_token_ms
            _per_token.labels(ended.operation, ended.model).observe(max(0, rest_ms) / 1000 / (ended.output_tokens - 1))

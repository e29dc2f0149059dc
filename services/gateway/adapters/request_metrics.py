"""`RequestObserver` as Prometheus metrics, with the names and buckets of OpenTelemetry's GenAI conventions.

Labels are operations, catalogue names and outcomes, never words of callers (invariant 17, case B45). Gauges are changed
where an object enters and leaves, so that every way out lowers them (case B46).
"""

from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram

from roundhouse.telemetry import REGISTRY
from roundhouse.vocabulary import Outcome
from services.gateway.ports import RequestEnded

# Source: OpenTelemetry semantic conventions for generative AI metrics, "explicit bucket boundaries".
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
SERIES_KEPT = 4_096  # looked up once; bounded by the catalogue all the same
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


@dataclass(frozen=True, slots=True)
class _Series:
    """What most requests of an operation and model change; looking each up again costs more than changing it."""

    started: Counter
    done: Counter
    duration: Histogram
    first_token: Histogram
    per_token: Histogram


@lru_cache(maxsize=SERIES_KEPT)
def _series(operation: str, model: str) -> _Series:
    return _Series(
        _started.labels(operation, model),
        _ended.labels(operation, model, Outcome.DONE.value),
        _duration.labels(operation, model, ""),
        _first_token.labels(operation, model),
        _per_token.labels(operation, model),
    )


@lru_cache(maxsize=SERIES_KEPT)
def _waiting_for(model: str) -> Gauge:
    return _waiting.labels(model)


class PrometheusObserver:
    """See the module."""

    def started(self, operation: str, model: str) -> None:
        """See `RequestObserver.started`."""
        _series(operation, model).started.inc()
        _in_flight.inc()

    def queued(self, model: str, change: int) -> None:
        """See `RequestObserver.queued`."""
        _waiting_for(model).inc(change)

    def ended(self, ended: RequestEnded) -> None:
        """See `RequestObserver.ended`."""
        _in_flight.dec()
        series = _series(ended.operation, ended.model)
        if ended.outcome is Outcome.DONE:
            series.done.inc()
            series.duration.observe(ended.total_ms / 1000)
        else:
            _ended.labels(ended.operation, ended.model, ended.outcome.value).inc()
            _duration.labels(ended.operation, ended.model, ended.error_type).observe(ended.total_ms / 1000)
        if ended.first_token_ms is None:
            return
        series.first_token.observe(ended.first_token_ms / 1000)
        if ended.output_tokens > 1:
            rest_ms = ended.total_ms - ended.first_token_ms
            series.per_token.observe(max(0, rest_ms) / 1000 / (ended.output_tokens - 1))

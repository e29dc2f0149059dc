"""`Observer` on Prometheus metrics and the readiness of this process. Labels are fixed sets (invariant 17)."""

from collections import Counter as Tally
from collections.abc import Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from roundhouse import telemetry
from roundhouse.ops_server import Readiness
from services.metering.domain.ledger import Result
from services.metering.domain.reconciling import Kind

_events = Counter(
    "roundhouse_metering_events",
    "Usage events consumed, by what became of them.",
    ["result"],
    registry=telemetry.REGISTRY,
)
_pending = Gauge(
    "roundhouse_metering_pending_events", "Usage events that are not in the ledger yet.", registry=telemetry.REGISTRY
)
_commit = Histogram(
    "roundhouse_metering_commit_seconds",
    "From a pulled batch to its commit.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
    registry=telemetry.REGISTRY,
)
_unpublished = Gauge(
    "roundhouse_metering_unpublished_rows",
    "Ledger rows that the billing stream does not have yet.",
    registry=telemetry.REGISTRY,
)
_differences = Counter(
    "roundhouse_metering_differences",
    "Requests on which the hourly comparison of the books found a difference.",
    ["kind"],
    registry=telemetry.REGISTRY,
)
_reconciled = Gauge(
    "roundhouse_metering_reconciled_until_seconds",
    "Unix time up to which the books were compared.",
    registry=telemetry.REGISTRY,
)
for _kind in Kind:
    _differences.labels(_kind.value)
for _result in Result:
    _events.labels(_result.value)  # a series exists before its first event


class ProcessObserver:
    """See `ports.Observer`."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def recorded(self, results: Sequence[Result], *, commit_ms: int) -> None:
        """See `Observer.recorded`."""
        _commit.observe(commit_ms / 1000)
        for result, count in Tally(results).items():
            _events.labels(result.value).inc(count)

    def pending(self, events: int) -> None:
        """See `Observer.pending`."""
        _pending.set(events)

    def unpublished(self, rows: int) -> None:
        """See `Observer.unpublished`."""
        _unpublished.set(rows)

    def condition(self, name: str, *, reason: str | None) -> None:
        """See `Observer.condition`."""
        self._readiness.set(name, reason=reason)

    def reconciled(self, until_ms: int, differences: Mapping[Kind, int]) -> None:
        """See `ReconcilingObserver.reconciled`."""
        _reconciled.set(until_ms / 1000)
        for kind, count in differences.items():
            _differences.labels(kind.value).inc(count)

    def engines_compared(self, models: int) -> None:
        """See `ReconcilingObserver.engines_compared`."""
        _differences.labels(Kind.ENGINE_DIFFERS.value).inc(models)

"""What the scheduler counts, for Prometheus. Labels: pools and models of the catalogue, and closed lists."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from roundhouse.telemetry import REGISTRY
from roundhouse.vocabulary import PoolName
from services.scheduler.adapters.pool_signals import PoolSignals
from services.scheduler.domain.plans import Wait
from services.scheduler.domain.records import PoolState, Ticket, model_of
from services.scheduler.domain.warmth.autoscale import PoolSignal

_WAITING = Gauge(
    "roundhouse_scheduler_waiting", "Requests in the queues", ["pool", "model", "priority_class"], registry=REGISTRY
)
_REASONS = Gauge("roundhouse_scheduler_waits", "Requests that wait, by reason", ["pool", "reason"], registry=REGISTRY)
_RUNNING = Gauge("roundhouse_scheduler_slots_in_use", "Requests that hold a slot", ["pool"], registry=REGISTRY)
_WAIT = Histogram(
    "roundhouse_scheduler_wait_seconds",
    "From submit to grant",
    ["pool", "priority_class"],
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
    registry=REGISTRY,
)
_GRANTS = Counter("roundhouse_scheduler_grants", "Requests granted", ["pool", "model"], registry=REGISTRY)
_REFUSALS = Counter("roundhouse_scheduler_refusals", "Requests refused", ["pool", "reason"], registry=REGISTRY)
_ENDINGS = Counter("roundhouse_scheduler_endings", "Attempts ended", ["pool", "outcome"], registry=REGISTRY)
_LOADS = Counter("roundhouse_scheduler_loads", "Loads asked for", ["pool", "model", "outcome"], registry=REGISTRY)


class PrometheusInstruments:
    """`Instruments` in the process's registry. `known_pools` bounds the label (invariant 17)."""

    def __init__(self) -> None:
        self._shown: dict[PoolName, set[tuple[str, str]]] = {}
        self._signals = PoolSignals()

    def refused(self, pool: PoolName, reason: str) -> None:
        """See `Instruments.refused`."""
        _REFUSALS.labels(self._known(pool), reason.removeprefix("REASON_").lower()).inc()

    def granted(self, pool: PoolName, ticket: Ticket) -> None:
        """See `Instruments.granted`."""
        _GRANTS.labels(pool, model_of(ticket.version)).inc()
        _WAIT.labels(pool, ticket.priority_class).observe(max(0, ticket.granted_ms - ticket.enqueued_ms) / 1000)

    def ended(self, pool: PoolName, outcome: str) -> None:
        """See `Instruments.ended`."""
        _ENDINGS.labels(self._known(pool), outcome).inc()

    def load_ended(self, pool: PoolName, model: str, outcome: str) -> None:
        """See `Instruments.load_ended`."""
        _LOADS.labels(pool, model, outcome).inc()

    def waiting(self, pool: PoolName, requests: Mapping[Wait, int]) -> None:
        """See `Instruments.waiting`."""
        for why, count in requests.items():
            _REASONS.labels(pool, why.value).set(count)

    def observed(self, pool: PoolName, state: PoolState) -> None:
        """See `Instruments.observed`. Lanes that are empty now are set to zero once and then dropped."""
        depths: dict[tuple[str, str], int] = {}
        for depth in state.depths:
            labels = (model_of(depth.version), depth.priority_class.value)
            depths[labels] = depths.get(labels, 0) + depth.waiting
        for labels in self._shown.get(pool, set()) - depths.keys():
            _WAITING.remove(pool, *labels)
        for labels, waiting in depths.items():
            _WAITING.labels(pool, *labels).set(waiting)
        self._shown[pool] = set(depths)
        _RUNNING.labels(pool).set(sum(state.in_use.values()))

    def planned(self, pool: PoolName, signal: PoolSignal) -> None:
        """See `Instruments.planned`."""
        self._signals.show(pool, signal)

    def _known(self, pool: PoolName) -> str:
        return pool if pool in self._shown else "unknown"  # a pool that callers make up is no series

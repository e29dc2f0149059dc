"""Counts of the usage outbox, on the process's metrics page."""

from prometheus_client import Counter, Gauge

from roundhouse.telemetry import REGISTRY

_waiting = Gauge("roundhouse_gateway_usage_events_waiting", "Usage events the stream lacks.", registry=REGISTRY)
_unwritten = Gauge(
    "roundhouse_gateway_usage_events_unwritten", "Usage events that the disk did not take.", registry=REGISTRY
)
_recovered = Counter(
    "roundhouse_gateway_usage_events_recovered",
    "Usage events that an earlier process had not published.",
    ["what"],
    registry=REGISTRY,
)
_damaged = Counter(
    "roundhouse_gateway_usage_records_damaged",
    "Records of the outbox that could not be read: torn by a kill, or corrupt and put aside.",
    ["how"],
    registry=REGISTRY,
)
for _what in ("ended", "abandoned"):
    _recovered.labels(_what)  # a series exists before its first event
for _how in ("torn", "corrupt"):
    _damaged.labels(_how)


def waiting(events: int, unwritten: int) -> None:
    """How many events wait for the stream, and how many of them are in memory only."""
    _waiting.set(events)
    _unwritten.set(unwritten)


def recovered(events: int, abandoned: int, corrupt: int, torn: int) -> None:
    """What a start found; `abandoned` of the `events` are of attempts that were running."""
    _recovered.labels("ended").inc(events - abandoned)
    _recovered.labels("abandoned").inc(abandoned)
    _damaged.labels("corrupt").inc(corrupt)
    _damaged.labels("torn").inc(torn)

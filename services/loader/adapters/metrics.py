"""The loader's metrics. Labels are tiers, outcomes, phases and models of the catalogue (invariant 17)."""

from prometheus_client import Counter, Gauge, Histogram

from roundhouse import telemetry
from roundhouse.vocabulary import ModelName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2

# From an empty model on a warm node (0.2 s) to 100 GB from slow storage; steps of about two.
_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200)

_bytes = Gauge(
    "roundhouse_loader_tier_bytes",
    "Bytes of a tier: its capacity, what is resident, what is reserved.",
    ["tier", "kind"],
    registry=telemetry.REGISTRY,
)
_speed = Gauge(
    "roundhouse_loader_tier_bytes_per_second",
    "How fast bytes moved lately from a tier towards the device; 0 = not measured.",
    ["tier"],
    registry=telemetry.REGISTRY,
)
_adapters = Gauge(
    "roundhouse_loader_adapters",
    "Adapters that the node has on its disk and in host memory, and those that fit no instance here.",
    ["place"],
    registry=telemetry.REGISTRY,
)
_staging = Gauge(
    "roundhouse_loader_staging_bytes",
    "Bytes of the versions that are being staged now: done, and in all.",
    ["kind"],
    registry=telemetry.REGISTRY,
)
_loads = Counter(
    "roundhouse_loader_loads",
    "Loads that ended: ready, failed, or refused for lack of room.",
    ["model", "outcome"],
    registry=telemetry.REGISTRY,
)
_phases = Histogram(
    "roundhouse_loader_phase_seconds",
    "Duration of the phases of successful loads.",
    ["phase"],
    buckets=_SECONDS,
    registry=telemetry.REGISTRY,
)
_unloads = Counter(
    "roundhouse_loader_unloads",
    "Instances that left: evicted for another, ordered, lost with Triton, unknown to the catalogue.",
    ["reason"],
    registry=telemetry.REGISTRY,
)
_evictions = Counter(
    "roundhouse_loader_evictions",
    "What left disk or host memory so that another fits; from devices see roundhouse_loader_unloads.",
    ["tier"],
    registry=telemetry.REGISTRY,
)
_devices = Gauge(
    "roundhouse_loader_device_bytes",
    "Bytes of a device: its capacity, what is resident, what is reserved.",
    ["device", "kind"],
    registry=telemetry.REGISTRY,
)
_unaccounted = Gauge(
    "roundhouse_loader_unaccounted_bytes",
    "Growth of memory that no model answers for: of Triton's processes (server) or of a device.",
    ["where"],
    registry=telemetry.REGISTRY,
)
_not_freed = Counter(
    "roundhouse_loader_not_freed",
    "Unloads after which a device did not show the memory as free in time.",
    ["device"],
    registry=telemetry.REGISTRY,
)
_recycled = Counter(
    "roundhouse_loader_triton_recycled",
    "Times that Triton was ended because its memory leaked.",
    registry=telemetry.REGISTRY,
)

_TIERS = {
    vocabulary_pb2.TIER_DEVICE: "device",
    vocabulary_pb2.TIER_HOST: "host",
    vocabulary_pb2.TIER_DISK: "disk",
    vocabulary_pb2.TIER_SOURCE: "source",
}


class PrometheusMeasurements:
    """`Measurements` in the registry of this process."""

    def load_ended(self, model: ModelName, outcome: str) -> None:
        """See `Measurements.load_ended`."""
        _loads.labels(model, outcome).inc()

    def phase_took(self, phase: str, duration_ms: int) -> None:
        """See `Measurements.phase_took`."""
        _phases.labels(phase).observe(duration_ms / 1000)

    def unloaded(self, reason: str) -> None:
        """See `Measurements.unloaded`."""
        _unloads.labels(reason).inc()

    def evicted(self, tier: str) -> None:
        """See `Measurements.evicted`."""
        _evictions.labels(tier).inc()

    def tiers(self, state: loading_pb2.NodeState) -> None:
        """See `Measurements.tiers`."""
        for tier in state.tiers:
            name = _TIERS[tier.tier]
            _speed.labels(name).set(tier.bytes_per_second)
            if not tier.capacity:
                continue
            _bytes.labels(name, "capacity").set(tier.capacity)
            _bytes.labels(name, "resident").set(tier.resident)
            _bytes.labels(name, "reserved").set(tier.reserved)

        for device in state.devices:
            _devices.labels(device.index, "capacity").set(device.capacity)
            _devices.labels(device.index, "resident").set(device.resident)
            _devices.labels(device.index, "reserved").set(device.reserved)
        _adapters.labels("disk").set(state.adapters.on_disk)
        _adapters.labels("host").set(state.adapters.in_host)
        _adapters.labels("refused").set(len(state.adapters.refused))

    def not_freed(self, device: int) -> None:
        """See `Measurements.not_freed`."""
        _not_freed.labels(device).inc()

    def unaccounted(self, where: str, size: int) -> None:
        """See `Measurements.unaccounted`."""
        _unaccounted.labels(where).set(size)

    def server_recycled(self) -> None:
        """See `Measurements.server_recycled`."""
        _recycled.inc()

    def moving(self, done: int, total: int) -> None:
        """See `Measurements.moving`."""
        _staging.labels("done").set(done)
        _staging.labels("total").set(total)

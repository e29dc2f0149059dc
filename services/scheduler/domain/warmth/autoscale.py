"""What an autoscaler and a person need to know of a pool: per model and in all. Records only; it scales nothing."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.domain.records import VersionKey

WINDOW_MS = 3_600_000
RETURN_LOADS = 10  # a model evicted within this many times its load time and needed again: the eviction was thrash
RETURN_LEAST_MS = 60_000  # guesses, both
FILL = 0.9  # nodes are planned to be filled to this: models do not pack without a rest


@dataclass(frozen=True, slots=True)
class ModelSignal:
    """One model."""

    version: VersionKey
    bytes: int
    rate_per_s: float
    wait_ms_mean: float
    promise_ms: int
    replicas: int
    replicas_wanted: int
    reason: str
    value_per_mib_s: float
    cold_loads_per_hour: float
    cold_load_ms: int

    @property
    def behind(self) -> bool:
        """Whether it has fewer replicas than it wants."""
        return self.replicas < self.replicas_wanted


@dataclass(frozen=True, slots=True)
class PoolSignal:
    """One pool."""

    models: tuple[ModelSignal, ...]
    memory_pressure: float  # bytes wanted / bytes there; above 1 something is left out
    nodes: int
    nodes_wanted: int
    thrash_index: float  # share of the loads of the last hour that brought back what had just been evicted


def pool_signal(
    models: Sequence[ModelSignal], nodes: int, bytes_per_node: int, thrash_index: float, nodes_least: int = 1
) -> PoolSignal:
    """Put together; nodes are counted as of one size."""
    wanted = sum(model.bytes * max(model.replicas_wanted, 0) for model in models)
    want_nodes = max(nodes_least, math.ceil(wanted / (bytes_per_node * FILL)))
    return PoolSignal(tuple(models), wanted / max(1, nodes * bytes_per_node), nodes, want_nodes, thrash_index)


@dataclass(slots=True)
class ThrashMeter:
    """Loads of the last hour, and which of them undid an eviction. Mutable; bounded by the loads of an hour."""

    evicted_ms: dict[VersionKey, int] = field(default_factory=dict)
    loads: deque[tuple[int, VersionKey, bool]] = field(default_factory=deque)

    def evicted(self, version: VersionKey, at_ms: int) -> None:
        """A model left to make room."""
        self.evicted_ms[version] = at_ms

    def loaded(self, version: VersionKey, load_ms: int, at_ms: int) -> None:
        """A model was loaded because it was wanted."""
        left_ms = self.evicted_ms.pop(version, None)
        undone = left_ms is not None and at_ms - left_ms <= max(RETURN_LEAST_MS, RETURN_LOADS * load_ms)
        self.loads.append((at_ms, version, undone))

    def index(self, now_ms: int) -> float:
        """Share of the loads of the last hour; 0 without loads."""
        while self.loads and self.loads[0][0] <= now_ms - WINDOW_MS:
            self.loads.popleft()
        for version in [each for each, at_ms in self.evicted_ms.items() if at_ms <= now_ms - WINDOW_MS]:
            del self.evicted_ms[version]
        return sum(undone for *_, undone in self.loads) / len(self.loads) if self.loads else 0.0

    def loads_per_hour(self, version: VersionKey) -> int:
        """Of one model."""
        return sum(each == version for _, each, _ in self.loads)

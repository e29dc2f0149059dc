"""When a model that is not ready could be: the sum of what a load has to wait for, from measurements where there are.

Queue of loads on the node, bytes to stage from the fastest tier that has them at that tier's measured speed, the
engine's start as it took before, and the unloads before it. Estimates rank nodes and tell callers; they decide no
correctness. Times in ms.
"""

from dataclasses import dataclass

from services.scheduler.domain.nodes import ARRIVING, InstanceView, NodeView, Tier, VersionSpec
from services.scheduler.domain.plans import PoolView
from services.scheduler.domain.records import base_of

PRIOR_BYTES_PER_MS = {
    Tier.SOURCE: 500_000,  # 0.5 GB/s: half of a 10 Gbit/s link, a guess
    Tier.DISK: 2_000_000,  # NVMe (ARCHITECTURE.md, "The problem")
    Tier.HOST: 10_000_000,  # PCIe 4.0 x16 without pinning, a guess
}
ENGINE_START_MS = 300  # an empty Python model loads in 180 to 500 ms on Triton (measured)
UNLOAD_MS = 200  # an unload that Triton confirms, with one poll of its index


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """Where the time until an instance is ready goes."""

    queue_ms: int = 0
    stage_ms: int = 0
    start_ms: int = 0
    unload_ms: int = 0

    @property
    def total_ms(self) -> int:
        """All of it."""
        return self.queue_ms + self.stage_ms + self.start_ms + self.unload_ms


def estimate(view: PoolView, node: NodeView, spec: VersionSpec, victims: int = 0) -> StartEstimate:
    """A load of a version on a node, begun now, after `victims` unloads. O(instances of the node)."""
    found = node.find_any(spec.version)
    stage_ms = 0 if found is not None and found.tier is Tier.HOST else _stage_ms(node, spec, found)
    return StartEstimate(_queue_ms(view, node, spec), stage_ms, _start_ms(view, node, spec), victims * UNLOAD_MS)


def remaining(view: PoolView, node: NodeView, spec: VersionSpec, arriving: InstanceView, now_ms: int) -> int:
    """What is left of a load that goes on; at least 0. The loader's own word wins."""
    if arriving.remaining_ms:
        return arriving.remaining_ms
    whole_ms = _stage_ms(node, spec, arriving) + _start_ms(view, node, spec)
    return max(0, whole_ms - (now_ms - arriving.since_ms))


def bytes_per_ms(node: NodeView, tier: Tier) -> int:
    """The measured speed of a tier of a node, else a prior."""
    return next((speed for name, speed in node.speeds if name is tier and speed), PRIOR_BYTES_PER_MS[tier])


def _stage_ms(node: NodeView, spec: VersionSpec, found: InstanceView | None) -> int:
    tier = found.tier if found is not None else Tier.SOURCE
    return spec.device_bytes // bytes_per_ms(node, tier)


def _start_ms(view: PoolView, node: NodeView, spec: VersionSpec) -> int:
    seen = view.start_ms.get(base_of(spec.version))
    return seen if seen is not None else ENGINE_START_MS + spec.device_bytes // bytes_per_ms(node, Tier.HOST)


def _queue_ms(view: PoolView, node: NodeView, spec: VersionSpec) -> int:
    """Loads that go on there: they share the disk, so what they still read goes before or beside."""
    waits = 0
    for each in node.instances:
        if each.residence in ARRIVING and base_of(each.version) != base_of(spec.version):
            other = view.specs.get(each.version, VersionSpec(each.version, each.device_bytes))
            waits += each.remaining_ms or _stage_ms(node, other, each)
    return waits

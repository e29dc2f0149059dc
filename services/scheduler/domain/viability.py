"""Whether a version can run in a pool at all: what a submit asks before anything is queued, evicted or loaded.

Pure. What it refuses costs nothing: no eviction, no byte staged (cases B13 and B22).
"""

from dataclasses import dataclass
from itertools import chain

from services.scheduler.domain.nodes import ARRIVING, InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.obstacles import devices_needed
from services.scheduler.domain.placement import PoolView, retry_at_ms
from services.scheduler.domain.records import VersionKey, instance_key
from services.scheduler.domain.sites import could_ever_hold, serves


@dataclass(frozen=True, slots=True)
class Viable:
    """The version can run: on `slots` slots now, or (0 = cold) after a load."""

    slots: int


@dataclass(frozen=True, slots=True)
class TooBig:
    """No node of the pool could ever hold it."""

    reason: str  # in words


@dataclass(frozen=True, slots=True)
class NoNode:
    """No node of the pool is healthy."""


@dataclass(frozen=True, slots=True)
class BackingOff:
    """Its load failed everywhere it could run; the next try is at `retry_at_ms`."""

    retry_at_ms: int
    tries: int  # on the node that is tried next
    cause: str


Viability = Viable | TooBig | NoNode | BackingOff


def viability(view: PoolView, spec: VersionSpec, now_ms: int) -> Viability:
    """Whether a version can run in a pool, now or after a load. Evicts and loads nothing (cases B13, B22)."""
    slots = sum(
        each.slots
        for node in view.holders(spec.version)
        if node.healthy and (each := node.find(spec.version)) is not None
        if each.residence is Residence.READY and not _is_closed(view, node, each, now_ms)
    )
    if slots:
        return Viable(slots)
    able = [node for node in view.nodes if serves(node, spec.version) and could_ever_hold(node, spec)]
    if view.nodes and not able:
        return TooBig(f"no node of its pool has {devices_needed(spec)}")
    healthy = [node for node in able if node.healthy]
    if not healthy:
        return Viable(0) if any(node.quiet for node in able) else NoNode()
    here = (node.find(spec.version) for node in view.holders(spec.version) if node.healthy)
    if any(each is not None and each.residence in ARRIVING for each in here):
        return Viable(0)
    first = min(healthy, key=lambda node: (retry_at_ms(view.state, node, spec.version), node.node_id))
    again_ms = retry_at_ms(view.state, first, spec.version)
    failure, found = view.state.failures.get((spec.version, first.node_id)), first.find(spec.version)
    if again_ms <= now_ms or (failure is not None and not failure.tries):
        return Viable(0)
    causes = chain([failure.cause] if failure else [], [found.reason] if found else [])
    return BackingOff(again_ms, failure.tries if failure else 1, next((each for each in causes if each), "unknown"))


def is_served(view: PoolView, version: VersionKey) -> bool:
    """Whether some node has an instance of it that takes requests, or is about to have one. O(holders)."""
    found = (node.find(version) for node in view.holders(version) if node.healthy or node.quiet)
    return any(each is not None and (each.residence is Residence.READY or each.residence in ARRIVING) for each in found)


def _is_closed(view: PoolView, node: NodeView, instance: InstanceView, now_ms: int) -> bool:
    """Whether some replica has closed it, for example because its process died."""
    mark = view.state.drains.get(instance_key(node.node_id, instance.version))
    return mark is not None and mark.until_ms > now_ms

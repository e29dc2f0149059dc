"""Which site a model is loaded on, of those that could take it: where it is expected to start first.

Its own nodes (`affinity.py`) are preferred as long as they are not clearly slower: what they hold of the model stays of
use there. Of equal nodes the one with the higher claim on the model wins, so that every replica of the scheduler agrees
and models spread evenly; in a node the tightest devices that fit.

Looked for near first: the few nodes with the highest claims, and those that hold its files; elsewhere only if none of
those can. So the cost of placing one model does not grow with the pool as long as there is room near.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from roundhouse.vocabulary import NodeId
from services.scheduler.domain import affinity
from services.scheduler.domain.cold_start import estimate
from services.scheduler.domain.nodes import NodeView, VersionSpec
from services.scheduler.domain.plans import PoolView
from services.scheduler.domain.sites import Rooms, Site, is_held

START_STEP_MS = 250  # starts that are expected to differ by less count as equal: estimates are no better than that
AWAY_STEPS = 2  # what a model's own nodes may be slower and still be preferred: half a second for warm caches, a guess
NEAR = 16  # nodes looked at before all others: enough for any model to find the emptier of some, a guess


@dataclass(frozen=True, slots=True)
class Preference:
    """A key that orders sites, best first."""

    view: PoolView
    spec: VersionSpec
    rooms: Rooms
    home: frozenset[NodeId]

    @classmethod
    def of(cls, view: PoolView, spec: VersionSpec, rooms: Rooms, able: Sequence[NodeView]) -> "Preference":
        """For one version; `able` are the nodes that could hold it, in the order of their claims."""
        replicas = sum(is_held(node, spec.version) for node in view.holders(spec.version))
        size = affinity.subset_size(replicas, spec.replicas_wanted)
        return cls(view, spec, rooms, frozenset(node.node_id for node in islice(filter(_is_healthy, able), size)))

    def __call__(self, site: Site) -> tuple[object, ...]:
        """Smaller is better."""
        node_id = site.node.node_id
        steps = estimate(self.view, site.node, self.spec).total_ms // START_STEP_MS
        away = 0 if node_id in self.home else AWAY_STEPS
        return steps + away, -affinity.weight(self.spec.version, node_id), node_id, self.rooms.slack(site), site.devices


def near_first(view: PoolView, spec: VersionSpec, candidates: Sequence[NodeView]) -> Iterator[list[NodeView]]:
    """The candidates in two groups: near ones, then all. `candidates` are in the order of their claims."""
    holders = {node.node_id for node in view.holders(spec.version)}
    near = [node for place, node in enumerate(candidates) if place < NEAR or node.node_id in holders]
    yield near
    if len(near) < len(candidates):
        yield list(candidates)


def _is_healthy(node: NodeView) -> bool:
    return node.healthy

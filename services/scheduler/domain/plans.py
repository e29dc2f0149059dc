"""What placement is made from and what it answers: records only, without behaviour."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from roundhouse.vocabulary import NodeId
from services.scheduler.domain import affinity
from services.scheduler.domain.nodes import InstanceView, NodeView, Role, VersionSpec
from services.scheduler.domain.records import InstanceKey, PoolState, VersionKey, base_of


class Wait(StrEnum):
    """Why requests wait. A closed list: it is a metric's label (invariant 17)."""

    SLOTS = "slots_in_use"  # an instance is ready; all its slots are taken
    LOADING = "loading"
    ROOM = "no_room"  # nothing that may leave now makes enough room
    TURN = "not_its_turn"  # what holds the memory has not had its time yet
    DRAINING = "draining"  # what holds the memory ends what it runs
    NODE = "no_node"  # no healthy node may load it
    BACK_OFF = "backing_off"  # its load failed, and the next try is not due
    DEVICES = "no_devices"  # no node has devices of the number, links and kind that it needs
    UNKNOWN = "not_in_catalogue"


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """When a busy model makes room for a waiting one. Both times are guesses until measured under real mixes."""

    quantum_ms: int = 10_000  # a ready model keeps its place at least this long while it is used or waited for
    quantum_loads: int = 2  # and at least this many times the time its load took
    patience_ms: int = 2_000  # a cold demand waits this long for an instance to become idle by itself


Worth = Callable[[InstanceView, int], tuple[float, int]]
"""What is lost if an idle instance leaves, given when it was last used; only the order matters. See `domain/warmth`."""


def last_used(instance: InstanceView, used_ms: int) -> tuple[float, int]:
    """The worth that needs no history: the one used longest ago is worth least."""
    return 0.0, used_ms


@dataclass(frozen=True, slots=True)
class NodeIndex:
    """What is looked up of some nodes. Most plans see the nodes of the plan before: whoever makes views may keep it."""

    nodes: tuple[NodeView, ...]
    node_ids: tuple[NodeId, ...]
    holding: Mapping[VersionKey, tuple[NodeView, ...]]  # by base version: nodes that list it
    free: Mapping[tuple[NodeId, int], int]  # bytes by node and device
    has_prefill: bool  # whether some healthy node is only for prompts

    @classmethod
    def of(cls, nodes: tuple[NodeView, ...]) -> "NodeIndex":
        """O(nodes and instances)."""
        holding: dict[VersionKey, list[NodeView]] = {}
        for node in nodes:
            for base in node.bases:
                holding.setdefault(base, []).append(node)
        return cls(
            nodes,
            tuple([node.node_id for node in nodes]),
            {version: tuple(holders) for version, holders in holding.items()},
            {(node.node_id, each.index): each.free for node in nodes for each in node.places},
            any(node.role is Role.PREFILL and node.healthy for node in nodes),
        )


NO_INDEX = NodeIndex((), (), {}, {}, has_prefill=False)


@dataclass(frozen=True, slots=True)
class PoolView:
    """Everything a plan is made from."""

    nodes: tuple[NodeView, ...]
    state: PoolState
    specs: Mapping[VersionKey, VersionSpec]
    worth: Worth = last_used
    start_ms: Mapping[VersionKey, int] = field(default_factory=dict)  # what engines took to start it, where seen
    index: NodeIndex = field(default=NO_INDEX, compare=False, repr=False)  # made anew unless it is of these very nodes

    def __post_init__(self) -> None:
        if self.index.nodes is not self.nodes:
            object.__setattr__(self, "index", NodeIndex.of(self.nodes))

    def order(self, version: VersionKey) -> tuple[NodeId, ...]:
        """All nodes by their claim on a model, highest first."""
        return affinity.order(version, self.index.node_ids)

    def holders(self, version: VersionKey) -> tuple[NodeView, ...]:
        """Nodes that list a version in any state, for whomever. O(1)."""
        return self.index.holding.get(base_of(version), ())


@dataclass(frozen=True, slots=True)
class Victim:
    """An instance that may leave."""

    instance: InstanceKey
    version: VersionKey


@dataclass(frozen=True, slots=True)
class Load:
    """Have a version loaded on a node, after the victims have left."""

    version: VersionKey
    node_id: NodeId
    bytes: int
    victims: tuple[Victim, ...]
    reason: str  # "demand" or "prewarm": for the audit stream
    devices: tuple[int, ...] = ()  # empty = the loader's choice
    alone_for: str = ""  # token of the tenant that has these devices alone; empty = they are shared


@dataclass(frozen=True, slots=True)
class Rotate:
    """Close a busy instance for new grants, so that `purpose` gets its memory when the running requests have ended."""

    victim: Victim
    purpose: VersionKey


@dataclass(frozen=True, slots=True)
class Parting:
    """Close an instance and unload it: it stands for others, and its version is to stand for `purpose` elsewhere."""

    victim: Victim
    node_id: NodeId
    purpose: VersionKey


@dataclass(frozen=True, slots=True)
class Reopen:
    """Open an instance again: whoever wanted its memory wants it no longer."""

    instance: InstanceKey


@dataclass(frozen=True, slots=True)
class Deferred:
    """Why requests for a version wait."""

    version: VersionKey
    why: Wait
    reason: str  # in words


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in order."""

    reopen: tuple[Reopen, ...] = ()
    loads: tuple[Load, ...] = ()
    rotations: tuple[Rotate, ...] = ()
    deferred: tuple[Deferred, ...] = ()  # wait for a load, or for room for one
    busy: tuple[Deferred, ...] = ()  # wait for a slot
    partings: tuple[Parting, ...] = ()

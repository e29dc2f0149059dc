"""What placement sees of nodes and of the catalogue. Frozen views; the wire messages become these in one place."""

from dataclasses import dataclass
from enum import StrEnum

from roundhouse.vocabulary import NodeId, PoolName
from services.scheduler.domain.records import VersionKey


class Residence(StrEnum):
    """How far an instance is. Source: ARCHITECTURE.md, "The life of a model version"."""

    STAGING = "staging"
    STAGED = "staged"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


ARRIVING = frozenset({Residence.STAGING, Residence.LOADING})
LEAVING = frozenset({Residence.DRAINING, Residence.UNLOADING})


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One version on one node, as its loader said last."""

    version: VersionKey
    residence: Residence
    device_bytes: int
    slots: int
    since_ms: int
    stage_ms: int = 0  # of the last load
    load_ms: int = 0
    reason: str = ""
    retry_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as its loader said last."""

    node_id: NodeId
    pool: PoolName
    healthy: bool  # accepting, and heard of lately
    device_capacity: int
    device_free: int  # capacity - resident - reserved
    instances: tuple[InstanceView, ...] = ()

    def find(self, version: VersionKey) -> InstanceView | None:
        """The instance of a version on this node."""
        return next((each for each in self.instances if each.version == version), None)


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """What the catalogue says of a version."""

    version: VersionKey
    device_bytes: int
    pinned: bool = False
    min_replicas: int = 0

    @property
    def replicas_wanted(self) -> int:
        """Instances to keep without any demand."""
        return max(self.min_replicas, 1 if self.pinned else 0)

"""What placement sees of nodes and of the catalogue. Frozen views; the wire messages become these in one place."""

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from roundhouse.vocabulary import NodeId, PoolName
from services.scheduler.domain.records import VersionKey, base_of, owner_of


class Residence(StrEnum):
    """How far an instance is. Source: ARCHITECTURE.md, "The life of a model version"."""

    STAGING = "staging"
    STAGED = "staged"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


class Role(StrEnum):
    """Which part of requests a node runs. Source: ARCHITECTURE.md, "Words"."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Tier(StrEnum):
    """Where weights are, next to the device last."""

    SOURCE = "source"
    DISK = "disk"
    HOST = "host"


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
    devices: tuple[int, ...] = ()  # it stands on these, evenly; empty = not told
    tier: Tier = Tier.SOURCE  # the fastest that holds its weights, whether it is on a device or not
    remaining_ms: int = 0  # of a load that goes on; 0 = not told


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One GPU or MIG slice."""

    index: int
    capacity: int
    free: int  # capacity - resident - reserved
    link_group: int = 0  # devices of one group exchange tensors directly
    mig: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as its loader said last."""

    node_id: NodeId
    pool: PoolName
    healthy: bool  # accepting, and heard of lately
    device_capacity: int
    device_free: int  # capacity - resident - reserved
    instances: tuple[InstanceView, ...] = ()
    role: Role = Role.MIXED
    devices: tuple[DeviceView, ...] = ()  # empty = one, of the node's size
    speeds: tuple[tuple[Tier, int], ...] = ()  # bytes per ms from a tier towards the device, where measured
    quiet: bool = False  # unhealthy only because it said nothing lately; it may be back in a moment
    places: tuple[DeviceView, ...] = field(init=False, compare=False, repr=False)  # its devices; at least one
    bases: tuple[VersionKey, ...] = field(init=False, compare=False, repr=False)  # of its instances, without owners

    def __post_init__(self) -> None:
        one = (DeviceView(0, self.device_capacity, self.device_free),)
        object.__setattr__(self, "places", self.devices or one)
        object.__setattr__(self, "bases", tuple(base_of(each.version) for each in self.instances))

    def find(self, version: VersionKey) -> InstanceView | None:
        """The instance of a version on this node, for that owner."""
        return next((each for each in self.instances if each.version == version), None)

    def find_any(self, version: VersionKey) -> InstanceView | None:
        """The instance of a version on this node, whoever it is for: there is one at most."""
        base = base_of(version)
        return next((each for each in self.instances if base_of(each.version) == base), None)


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """What the catalogue says of a version."""

    version: VersionKey
    device_bytes: int
    pinned: bool = False
    min_replicas: int = 0
    devices: int = 1  # it takes this many of one link group, all or none
    alone: bool = False  # only on MIG slices that nobody but its owner uses
    start_slo_ms: int = 0  # how long a request may wait for its start before the model wants another instance; 0 = ever

    @property
    def alone_for(self) -> str:
        """A token of the tenant that has its devices alone, since nodes need not know tenants; empty = shared."""
        return sha256(owner_of(self.version).encode()).hexdigest()[:16] if self.alone else ""

    @property
    def share(self) -> int:
        """Bytes on each of its devices."""
        return -(-self.device_bytes // self.devices)

    @property
    def replicas_wanted(self) -> int:
        """Instances to keep without any demand."""
        return max(self.min_replicas, 1 if self.pinned else 0)

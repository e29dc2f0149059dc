"""The words of one model version's life on a node: states, what happens to it, and what is to be done next.

    registered ─► admitting ─► staging ─► loading ─► ready ─► draining ─► unloading ─► staged
        ▲             │           │          │                   │            │
        └─ not admitted           └─► failed ◄── unloading ◄─ load failed     └─► admitting (wanted again)

`life` has the transitions. Source: ARCHITECTURE.md, "The life of a model version".
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

from services.loader.domain.versions import ModelVersion


class State(StrEnum):
    """Where a version stands on this node."""

    REGISTERED = "registered"  # known, nothing of it is here
    STAGED = "staged"  # verified weights are on this node's disk
    ADMITTING = "admitting"  # whether and where it fits is being decided
    STAGING = "staging"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # takes no new request; still loaded
    UNLOADING = "unloading"  # Triton was told; bytes are held until its index agrees
    FAILED = "failed"

    @property
    def is_at_rest(self) -> bool:
        """Nothing of the version is on a device or promised there."""
        return self in (State.REGISTERED, State.STAGED, State.FAILED)


class Command(Enum):
    """What is to be done next for a version. At most one at a time; each ends in an event."""

    ADMIT = "admit"  # → Admitted | NotAdmitted
    STAGE = "stage"  # → Staged | StageFailed
    LOAD = "load"  # → Loaded | LoadFailed
    DRAIN = "drain"  # → DrainElapsed
    UNLOAD = "unload"  # → Unloaded


class Order(StrEnum):
    """What a caller asked for last."""

    NONE = "none"
    LOAD = "load"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class Instance:
    """One version on this node. `wanted` is what it moves towards; `generation` and `order` say who asked last."""

    version: ModelVersion
    state: State = State.REGISTERED
    since_ms: int = 0
    steps: int = 0  # state changes so far: tells two stays in the same state apart
    wanted: bool = False
    generation: int = 0
    order: Order = Order.NONE
    attempt: int = 0  # loads begun so far
    on_disk: bool = False
    reason: str = ""  # why the last load failed
    failures: int = 0  # in a row
    retry_at_ms: int = 0
    stage_ms: int = 0  # of the last load
    load_ms: int = 0


# Commands from callers. Generation ≥ 1; the newest wins.
@dataclass(frozen=True, slots=True)
class LoadCommanded:
    """Somebody wants it ready. `force` ignores the pause after a failure (operators)."""

    generation: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class UnloadCommanded:
    """Somebody wants it gone."""

    generation: int


# What the node does to it.
@dataclass(frozen=True, slots=True)
class Admitted:
    """Room is promised."""


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """There is no room, or there can never be: not a failure of the version."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The weights are on disk and match the catalogue."""

    stage_ms: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The weights cannot be had."""

    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Triton says it is ready."""

    load_ms: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Triton could not load it, or not in time; it may still hold memory."""

    reason: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """Another load was promised its bytes: it takes no new request from now on."""


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """That load does not need them after all."""


@dataclass(frozen=True, slots=True)
class DrainElapsed:
    """Nobody sends to it any more. `steps` names the stay in DRAINING that is over."""

    steps: int


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Triton's index says that it is gone."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Triton does not have it any more, for example because it was restarted."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """Triton has it already: an earlier loader process loaded it."""


@dataclass(frozen=True, slots=True)
class FoundLeaving:
    """Triton is unloading it: an earlier loader process told it to."""


@dataclass(frozen=True, slots=True)
class FoundOnDisk:
    """The disk cache has its weights."""


@dataclass(frozen=True, slots=True)
class DroppedFromDisk:
    """The disk cache let its weights go."""


Event = (
    LoadCommanded
    | UnloadCommanded
    | Admitted
    | NotAdmitted
    | Staged
    | StageFailed
    | Loaded
    | LoadFailed
    | Claimed
    | Unclaimed
    | DrainElapsed
    | Unloaded
    | Lost
    | Adopted
    | FoundLeaving
    | FoundOnDisk
    | DroppedFromDisk
)


@dataclass(frozen=True, slots=True)
class Moved:
    """The event was taken (perhaps without effect); `command` is to be done next, if any."""

    instance: Instance
    command: Command | None = None


@dataclass(frozen=True, slots=True)
class Stale:
    """A newer command is known; nothing changed."""

    known_generation: int


@dataclass(frozen=True, slots=True)
class BackingOff:
    """The version failed to load and is left alone until `retry_at_ms`; nothing changed."""

    reason: str
    retry_at_ms: int


Step = Moved | Stale | BackingOff

"""What the fair queue speaks in: entries, offers, tickets and answers. Frozen; no behaviour beyond identity.

All times are milliseconds of the Unix epoch; service is counted in thousandths of a unit (see `service.py`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import NewType

from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId

AttemptId = NewType("AttemptId", str)  # "<request_id>/<attempt>"
VersionKey = NewType("VersionKey", str)  # "<model>@<digest>", with "!<tenant>" if it has replicas of its own
InstanceKey = NewType("InstanceKey", str)  # "<length of node>:<node>:<model>@<digest>"

KEYS_KEPT = 65_536  # derived keys remembered: a plan for 1,000 nodes asks for each of 20,000 again and again

PREFILL_STAGE = "~prefill"
"""The owner of what stands on prefill nodes: such an instance serves no request alone. No tenant is called so."""

BROKEN = VersionKey("@broken")
"""The purpose of the drain mark on an instance whose process died; no model is called "", so no demand has it."""

CLASSES: tuple[PriorityClass, ...] = (PriorityClass.INTERACTIVE, PriorityClass.STANDARD, PriorityClass.BATCH)
"""Most urgent first: also the order in which ties between classes are broken."""


def attempt_id(request_id: str, attempt: int) -> AttemptId:
    """One attempt of one request."""
    return AttemptId(f"{request_id}/{attempt}")


def version_key(model: str, digest: str, owner: str = "") -> VersionKey:
    """One version of a model: what requests queue for. `owner` = the tenant that shares no instance with others.

    Injective: a digest holds neither "@" nor "!", a tenant's name no "@"."""
    return VersionKey(f"{model}@{digest}!{owner}" if owner else f"{model}@{digest}")


def model_of(version: VersionKey) -> str:
    """The catalogue name inside a version key."""
    return version.rpartition("@")[0]


def digest_of(version: VersionKey) -> str:
    """The digest inside a version key."""
    return version.rpartition("@")[2].partition("!")[0]


def owner_of(version: VersionKey) -> str:
    """The tenant that shares no instance of this version with others; empty = it is shared."""
    return version.rpartition("@")[2].partition("!")[2]


@lru_cache(maxsize=KEYS_KEPT)
def base_of(version: VersionKey) -> VersionKey:
    """The version without its owner: what a node holds once at most."""
    return version_key(model_of(version), digest_of(version))


@lru_cache(maxsize=KEYS_KEPT)
def instance_key(node_id: NodeId, version: VersionKey) -> InstanceKey:
    """One version on one node. Without the loader's incarnation: a restarted loader finds its streams still counted.

    Without its owner too: whoever it is for, it is one thing that runs or is closed."""
    return InstanceKey(f"{len(node_id.encode())}:{node_id}:{base_of(version)}")


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """A further queue that an entry counts in: of its key, or of the name that its tenant calls the model by."""

    scope: str  # without spaces
    requests: int  # that may be queued in the pool; -1 = no limit
    tokens: int  # input + output; 0 = no limit


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request as the queue sees it. `payload` is opaque here and comes back with every ticket."""

    attempt: AttemptId
    tenant_id: TenantId
    version: VersionKey
    priority_class: PriorityClass
    input_tokens: int
    max_output_tokens: int
    deadline_ms: int
    weight_milli: int = 1000  # the tenant's weight in thousandths
    payload: bytes = b""
    warm: tuple[tuple[InstanceKey, int], ...] = ()  # input tokens whose blocks an instance has; 0 where not named
    queues: tuple[QueueLimit, ...] = ()  # beside the tenant's own, whose limits are the `Room`'s


@dataclass(frozen=True, slots=True)
class Room:
    """What the caller knows about the capacity behind an entry."""

    queue_limit: int  # requests the tenant may have queued in the pool
    slots: int  # of all ready instances of the version; 0 = cold
    start_after_ms: int = 0  # no slot can open earlier than this from now: the expected load of a cold model
    token_limit: int = 0  # input + output tokens the tenant may have queued in the pool; 0 = no limit
    wait_most_ms: int = 0  # with a longer wait the caller would rather go elsewhere; 0 = up to the deadline


class Part(StrEnum):
    """Which part of a request an instance runs. A request needs one `WHOLE` or `DECODE`, or `PREFILL` and `DECODE`."""

    WHOLE = "w"
    PREFILL = "p"
    DECODE = "d"  # also runs whole requests


@dataclass(frozen=True, slots=True)
class Offer:
    """A ready instance that may take requests, up to `slots` at once. `place` is opaque and kept with the grant.

    A request goes where its first token is expected first: uncached tokens × `token_us` + use / slots × `load_us`, for
    a prefill instance also `handoff_us`. Integers, so that every store decides the same."""

    instance: InstanceKey
    version: VersionKey
    slots: int
    place: bytes = b""
    part: Part = Part.WHOLE
    token_us: int = 0  # prefill of one token that is not cached
    load_us: int = 0  # what its running requests add when all slots are in use
    handoff_us: int = 0  # to bring a prompt's blocks to the decode instance
    owner: str = ""  # whose the instance was when the caller looked; the offer is void if it has changed hands


class Standing(StrEnum):
    """Where an attempt stands."""

    QUEUED = "queued"
    GRANTED = "granted"
    REFUSED = "refused"  # left the queue without running; the gateway has not acknowledged it yet
    LAPSED = "lapsed"  # its lease ran out; the usage event is not published yet
    ENDED = "ended"


class RefusalReason(StrEnum):
    """Why a queued request left the queue without running."""

    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    NEVER_FITS = "never_fits"
    REPLACED = "replaced"  # no node serves its version any more, and the catalogue names another


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens an attempt has used so far."""

    input: int = 0
    cached: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Everything another replica needs to carry on with an attempt: deliver its grant, its refusal or its usage."""

    attempt: AttemptId
    standing: Standing
    payload: bytes
    enqueued_ms: int
    version: VersionKey
    priority_class: PriorityClass
    place: bytes = b""
    granted_ms: int = 0
    lease_expires_ms: int = 0  # of a lapsed one: when it was last renewed
    ended_ms: int = 0
    reason: str = ""
    message: str = ""
    used: Tokens = Tokens()
    prefill_place: bytes = b""  # of the instance that runs the prompt, if it is another one


@dataclass(frozen=True, slots=True)
class Queued:
    """Accepted: `position` requests of this tenant and class go first; it may start in `wait_ms`."""

    position: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Known:
    """This attempt was submitted before; nothing changed."""

    standing: Standing


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The queue of the tenant, or of a `scope` of it, has no room; one place opens in about `retry_after_ms`.

    Nothing changed."""

    retry_after_ms: int
    scope: str = ""


@dataclass(frozen=True, slots=True)
class TooLate:
    """It could not start before its deadline: the wait is `wait_ms`. Nothing changed."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class Shed:
    """Batch work, while the other classes' backlog takes too long; worth a try in `retry_after_ms`. Nothing changed."""

    retry_after_ms: int


Enqueued = Queued | Known | QueueFull | TooLate | Shed


@dataclass(frozen=True, slots=True)
class Taken:
    """What one `take` did: grants in the order made, and what it found past its deadline."""

    granted: tuple[Ticket, ...] = ()
    refused: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, as its gateway reports it."""

    attempt: AttemptId
    outcome: Outcome
    used: Tokens = Tokens()
    run_ms: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """The ending was recorded now; the slot (if any) is free."""

    version: VersionKey


@dataclass(frozen=True, slots=True)
class NotHeld:
    """Nothing to end: unknown, or ended before."""


Finish = Settled | NotHeld


@dataclass(frozen=True, slots=True)
class Turn:
    """What one replica has gathered for one pool. It is done in this order, as one decision."""

    endings: tuple[Ending, ...] = ()
    entries: tuple[tuple[QueueEntry, Room], ...] = ()
    offers: tuple[Offer, ...] = ()
    limit: int = 0  # of grants


@dataclass(frozen=True, slots=True)
class TurnDone:
    """One answer for each ending and each entry, in order."""

    finishes: tuple[Finish, ...]
    enqueued: tuple[Enqueued, ...]
    taken: Taken


class Cancelled(StrEnum):
    """What a cancellation met."""

    REMOVED = "removed"  # it was queued
    RUNNING = "running"  # it is granted and ends by `finish`
    GONE = "gone"  # it had ended
    UNKNOWN = "unknown"  # not seen yet; a later submit of it will be told that it ended


@dataclass(frozen=True, slots=True)
class Progress:
    """One lease of a heartbeat."""

    attempt: AttemptId
    used: Tokens = Tokens()


@dataclass(frozen=True, slots=True)
class Expired:
    """What ran out: queued requests past their deadline, leases past their time."""

    refused: tuple[Ticket, ...] = ()
    lapsed: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class Draining:
    """The instance takes no new request; `in_use` are still running on it."""

    in_use: int


@dataclass(frozen=True, slots=True)
class DrainDenied:
    """The instance may not be drained (invariant 8)."""

    in_use: int
    waiting: int


Drain = Draining | DrainDenied


class DrainStage(StrEnum):
    """How far the unload of a closed instance is."""

    IDLE = "i"  # nobody wanted it; a request for its version that comes now takes the mark away (invariant 9)
    ROTATING = "r"  # it is wanted, but had its time: requests for its version wait for the reload
    SENT = "s"  # its loader has the order


@dataclass(frozen=True, slots=True)
class DrainMark:
    """Why an instance takes no new request."""

    purpose: VersionKey  # the version that gets its memory
    until_ms: int  # the mark is void from then on, so a crashed replica cannot keep an instance closed
    stage: DrainStage = DrainStage.IDLE
    of: VersionKey = VersionKey("")  # what the instance is, without its owner


@dataclass(frozen=True, slots=True)
class LoadClaim:
    """One replica's right to have a version loaded (invariant 7)."""

    node_id: NodeId
    owner: str
    until_ms: int
    bytes: int
    devices: tuple[int, ...] = ()  # all of them, or none: half a gang is never claimed


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """What is known about failed loads of a version on a node."""

    retry_at_ms: int
    tries: int  # since the last success; 0 = only lack of room
    cause: str


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """Requests that wait for one version in one class."""

    version: VersionKey
    priority_class: PriorityClass
    waiting: int
    oldest_ms: int  # when the oldest of them was queued
    run_ms: int = 0  # what a request of the version takes lately; 0 = not known


@dataclass(frozen=True, slots=True)
class PoolState:
    """A snapshot of one pool for placement. `revision` changes with every claim and drain mark."""

    revision: int
    depths: tuple[LaneDepth, ...]
    in_use: dict[InstanceKey, int]
    used_ms: dict[InstanceKey, int]  # when an instance last began or ended a request
    drains: dict[InstanceKey, DrainMark]
    loads: dict[VersionKey, LoadClaim]
    failures: dict[tuple[VersionKey, NodeId], LoadFailure]
    owners: dict[InstanceKey, TenantId] = field(default_factory=dict)  # instances that one tenant has for itself

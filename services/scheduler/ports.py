"""What the scheduler's operations need of the world. Adapters implement these; tests pass fakes.

Each fake passes the contract suite of the real adapter.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from roundhouse.catalogue.records import Catalogue
from roundhouse.vocabulary import GatewayId, NodeId, PoolName
from roundhouse.wire.v1 import loading_pb2, scheduling_pb2, usage_pb2
from services.scheduler.domain.plans import Wait
from services.scheduler.domain.records import (
    AttemptId,
    Cancelled,
    Drain,
    Ending,
    Enqueued,
    Expired,
    Finish,
    InstanceKey,
    LoadFailure,
    Offer,
    PoolState,
    Progress,
    QueueEntry,
    RefusalReason,
    Room,
    Taken,
    Ticket,
    Turn,
    TurnDone,
    VersionKey,
)
from services.scheduler.domain.residency import Claim, ClaimOrder, DrainOrder
from services.scheduler.domain.warmth.autoscale import PoolSignal
from services.scheduler.domain.warmth.history import Entry


class SchedulingStore(Protocol):
    """The queues of all pools, shared by all replicas. Every verb is atomic and decides as `FairQueue` does.

    Every verb raises Unavailable if the store is away; then it may have happened or not, and repeating it is safe."""

    async def turn(self, pool: PoolName, turn: Turn, now_ms: int) -> TurnDone:
        """Endings, then entries, then grants, as one decision.

        Raises Unavailable too, and does nothing, if it hands slots out and `now_ms` is behind what other replicas
        said: this process was frozen."""
        ...

    async def enqueue(self, pool: PoolName, entry: QueueEntry, room: Room, now_ms: int) -> Enqueued:
        """Queue an attempt. A refusal changes nothing."""
        ...

    async def take(self, pool: PoolName, offers: Sequence[Offer], limit: int, now_ms: int) -> Taken:
        """Grant up to `limit` requests on the offered instances."""
        ...

    async def finish(self, pool: PoolName, endings: Sequence[Ending], now_ms: int) -> tuple[Finish, ...]:
        """Settle attempts; one answer each, in order."""
        ...

    async def cancel(self, pool: PoolName, attempt: AttemptId, now_ms: int) -> Cancelled:
        """Take an attempt out of its queue."""
        ...

    async def renew(self, pool: PoolName, leases: Sequence[Progress], now_ms: int) -> tuple[AttemptId, ...]:
        """Extend leases; returns those that are not held."""
        ...

    async def expire(self, pool: PoolName, now_ms: int) -> Expired:
        """Refuse overdue requests and settle lapsed leases."""
        ...

    async def refuse(
        self, pool: PoolName, version: VersionKey, before_ms: int, reason: RefusalReason, message: str, now_ms: int
    ) -> tuple[Ticket, ...]:
        """Refuse what waits for a version with a deadline before `before_ms`."""
        ...

    async def claim_due(self, pool: PoolName, now_ms: int) -> tuple[Ticket, ...]:
        """What must be delivered again."""
        ...

    async def acknowledge(self, pool: PoolName, attempts: Sequence[AttemptId], now_ms: int) -> None:
        """The message of each attempt arrived."""
        ...

    async def begin_drain(self, pool: PoolName, order: DrainOrder, now_ms: int) -> Drain:
        """Close an instance for new grants."""
        ...

    async def send_drains(
        self, pool: PoolName, purpose: VersionKey, instances: Sequence[InstanceKey], until_ms: int, now_ms: int
    ) -> bool:
        """To be called right before closed instances are unloaded. False: one was reclaimed by a request, leave all."""
        ...

    async def clear_drain(
        self, pool: PoolName, instance: InstanceKey, now_ms: int, purpose: VersionKey | None = None
    ) -> None:
        """Open an instance again, if it is closed for `purpose` (None: for whatever)."""
        ...

    async def claim_load(self, pool: PoolName, order: ClaimOrder, now_ms: int) -> Claim:
        """Claim the load of a version."""
        ...

    async def renew_load(self, pool: PoolName, version: VersionKey, owner: str, until_ms: int, now_ms: int) -> bool:
        """Keep a claim; False if it was lost."""
        ...

    async def release_load(
        self,
        pool: PoolName,
        version: VersionKey,
        node_id: NodeId,
        owner: str,
        failure: LoadFailure | None,
        now_ms: int,
    ) -> None:
        """End a claim and record how the load ended."""
        ...

    async def snapshot(self, pool: PoolName, now_ms: int) -> PoolState:
        """Everything placement needs to know of the pool's queues."""
        ...


class History(Protocol):
    """What happened in each pool, shared by all replicas. Entries come in one order for all; old ones are dropped."""

    async def append(self, pool: PoolName, entry: Entry) -> None:
        """Add what this replica saw. Raises Unavailable; then it may be in the history or not."""
        ...

    async def after(self, pool: PoolName, cursor: str) -> tuple[tuple[Entry, ...], str]:
        """The next entries after a cursor ("" = the oldest that is kept), and the cursor after them.

        A long past comes in pieces: ask until nothing comes. Raises Unavailable."""
        ...


class AuditTrail(Protocol):
    """Tells operators what was done, and why."""

    async def record(
        self, what: str, *, actor: str, subject: str, reason: str = "", details: Mapping[str, str] | None = None
    ) -> None:
        """Write one event. Never raises for a missing bus: what was done stays done, and the log has it."""
        ...


class CatalogueSource(Protocol):
    """The catalogue as this process knows it."""

    @property
    def current(self) -> Catalogue:
        """The newest generation seen."""
        ...


class LoaderFleet(Protocol):
    """The loaders, by address."""

    def ensure_loaded(
        self, address: str, request: loading_pb2.EnsureLoadedRequest
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        """Stream progress; the last one is READY. Closing it leaves the load running.

        Raises CapacityExhausted (does not fit now), InvalidInput (never fits that node), Conflict (older generation),
        DeadlinePassed, Unavailable (the loader is away, or the load failed: the message says why)."""
        ...

    async def ensure_unloaded(self, address: str, request: loading_pb2.EnsureUnloadedRequest) -> None:
        """Return once the version is gone and its memory free; that it was not there is no error. Idempotent.

        Raises Conflict (a newer order wants it), DeadlinePassed (the unload goes on), Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class BlockList:
    """All blocks of a node's kvstore as of one announcement."""

    incarnation: str
    sequence: int
    keys: tuple[bytes, ...]  # the first 8 bytes of each


class BlockLists(Protocol):
    """The kvstores, by address."""

    async def list_blocks(self, address: str) -> BlockList:
        """Everything that is stored there. Raises Unavailable."""
        ...


class GatewayLink(Protocol):
    """The gateways, by id."""

    async def deliver(self, gateway_id: GatewayId, what: scheduling_pb2.GrantDelivery) -> scheduling_pb2.GrantAck:
        """Deliver one grant or rejection. Raises Unavailable if the gateway does not answer in time."""
        ...


class UsageOutlet(Protocol):
    """Where usage events go."""

    async def publish(self, event: usage_pb2.UsageEvent) -> None:
        """Hand an event to the stream; returns once it is stored. Raises Unavailable. Idempotent by event id."""
        ...


class Instruments(Protocol):
    """What is counted. Labels come from the catalogue and from closed lists (invariant 17)."""

    def refused(self, pool: PoolName, reason: str) -> None:
        """A submit or a queued request was refused."""
        ...

    def granted(self, pool: PoolName, ticket: Ticket) -> None:
        """A request got its slot."""
        ...

    def ended(self, pool: PoolName, outcome: str) -> None:
        """An attempt ended."""
        ...

    def load_ended(self, pool: PoolName, model: str, outcome: str) -> None:
        """A load that this replica asked for ended: "ready", "no_room" or "failed"."""
        ...

    def waiting(self, pool: PoolName, requests: Mapping[Wait, int]) -> None:
        """How many requests wait for which reason, as of the last plan; every reason is named."""
        ...

    def observed(self, pool: PoolName, state: PoolState) -> None:
        """The queues as just read."""
        ...

    def planned(self, pool: PoolName, signal: PoolSignal) -> None:
        """What an autoscaler needs to know of a pool, every few seconds."""
        ...

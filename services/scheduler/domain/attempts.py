"""What the in-memory queue remembers of one attempt, and of one model version. Mutable; owned by one `FairQueue`."""

from dataclasses import dataclass, field

from roundhouse.vocabulary import PriorityClass, TenantId
from services.scheduler.domain import service
from services.scheduler.domain.lanes import Lane, QueueKey
from services.scheduler.domain.records import (
    CLASSES,
    AttemptId,
    InstanceKey,
    QueueEntry,
    Standing,
    Ticket,
    Tokens,
    VersionKey,
)

_NO_INSTANCE = InstanceKey("")
_NO_TOKENS = Tokens()


@dataclass(slots=True)
class Attempt:
    """One attempt from submit to tombstone."""

    entry: QueueEntry
    key: QueueKey
    enqueued_ms: int
    standing: Standing = Standing.QUEUED
    instance: InstanceKey = _NO_INSTANCE
    place: bytes = b""
    prefill: InstanceKey = _NO_INSTANCE  # until its part has ended
    prefill_place: bytes = b""
    granted_ms: int = 0
    lease_expires_ms: int = 0
    ended_ms: int = 0
    reason: str = ""
    message: str = ""
    used: Tokens = _NO_TOKENS
    units: int = 0  # charged so far
    epoch: int = 0  # of the tenant's account when it was dispatched

    def ticket(self) -> Ticket:
        """A frozen copy for the outside."""
        return Ticket(
            attempt=self.entry.attempt,
            standing=self.standing,
            payload=self.entry.payload,
            enqueued_ms=self.enqueued_ms,
            version=self.entry.version,
            priority_class=self.entry.priority_class,
            place=self.place,
            granted_ms=self.granted_ms,
            lease_expires_ms=self.lease_expires_ms,
            ended_ms=self.ended_ms,
            reason=self.reason,
            message=self.message,
            used=self.used,
            prefill_place=self.prefill_place,
        )


@dataclass(slots=True)
class VersionQueues:
    """The three lanes of one version: which class goes next."""

    lanes: dict[PriorityClass, Lane] = field(default_factory=lambda: {name: Lane() for name in CLASSES})
    pass_floor_milli: int = 0  # pass of the class served last
    running: int = 0
    average_run_milli: int = 0

    @property
    def waiting(self) -> int:
        """Requests in all lanes."""
        return sum(lane.waiting for lane in self.lanes.values())

    def lift_class(self, name: PriorityClass) -> None:
        """Bring a class that had nothing waiting up to the least pass of those that have; classes save up nothing."""
        active = [lane.pass_milli for lane in self.lanes.values() if lane.waiting]
        lane = self.lanes[name]
        lane.pass_milli = max(lane.pass_milli, min(active, default=self.pass_floor_milli))

    def next_class(self, policy: service.Policy, now_ms: int) -> PriorityClass:
        """Stride scheduling (Waldspurger and Weihl, 1995) with ageing: the least pass, less what waiting earned.

        Starvation is impossible (invariant 4): every dispatch raises the pass of the class served, and a waiting
        class's discount only grows."""

        def urgency(name: PriorityClass) -> tuple[int, int]:
            lane = self.lanes[name]
            waited_ms = max(0, now_ms - lane.oldest_ms())
            return lane.pass_milli - policy.ageing_per_ms * waited_ms, CLASSES.index(name)

        return min((name for name in CLASSES if self.lanes[name].waiting), key=urgency)

    def charge_class(self, name: PriorityClass, units: int, policy: service.Policy) -> None:
        """Advance the class that was chosen."""
        lane = self.lanes[name]
        self.pass_floor_milli = max(self.pass_floor_milli, lane.pass_milli)
        lane.pass_milli += service.charge_milli(units, policy.share_milli(name))

    def correct_class(self, name: PriorityClass, before: int, after: int, policy: service.Policy) -> None:
        """Replace a charge of `before` units by `after`."""
        share = policy.share_milli(name)
        self.lanes[name].pass_milli += service.charge_milli(after, share) - service.charge_milli(before, share)


@dataclass(slots=True)
class Pace:
    """How fast a tenant's queue drains."""

    last_ms: int = 0  # of the last dispatch that left requests behind; 0 = none
    average_milli: int = 0  # ms between such dispatches, in thousandths


def estimate_wait_ms(queues: VersionQueues, lane: Lane, rank: int, slots: int, others: int) -> int:
    """When a slot opens for a request with `rank` of its tenant ahead and `others` further tenants in its lane.

    Optimistic on purpose: a request is refused by it only if even this start is past its deadline."""
    ahead = min(lane.waiting, rank * (others + 1))
    if slots and queues.running >= slots:
        ahead += 1
    return ahead * queues.average_run_milli // (1000 * max(1, slots))


def tombstone(attempt_id: AttemptId, now_ms: int) -> Attempt:
    """The memory of an attempt that was cancelled before it was seen."""
    entry = QueueEntry(attempt_id, TenantId(""), VersionKey("@"), PriorityClass.STANDARD, 0, 0, 0)
    return Attempt(entry, (0, 0, attempt_id), now_ms, standing=Standing.ENDED, ended_ms=now_ms)

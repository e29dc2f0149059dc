"""What the in-memory queue remembers of one attempt, and of one model version. Mutable; owned by one `FairQueue`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundhouse.vocabulary import PriorityClass, TenantId
from services.scheduler.domain import service
from services.scheduler.domain.lanes import Lane, QueueKey
from services.scheduler.domain.records import (
    CLASSES,
    AttemptId,
    InstanceKey,
    LaneDepth,
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
    average_output_milli: int = 0  # of all tenants' requests

    @property
    def waiting(self) -> int:
        """Requests in all lanes."""
        return sum([lane.waiting for lane in self.lanes.values()])

    def predicted_units(self, entry: QueueEntry, policy: service.Policy) -> int:
        """What a request will probably cost: by its tenant's recent ones here, else by everybody's."""
        account = self.lanes[entry.priority_class].account(entry.tenant_id)
        if policy.device_time:
            return (account.average_cost_milli or self.average_run_milli or service.FIRST_RUN_MS * 1000) // 1000
        output = service.predicted_output(
            account.average_output_milli, self.average_output_milli, entry.max_output_tokens
        )
        return service.cost_units(entry.input_tokens, 0, output)

    def credit_milli(self, entry: QueueEntry, policy: service.Policy) -> int:
        """The burst credit of the entry's tenant (invariant 5)."""
        average = self.lanes[entry.priority_class].account(entry.tenant_id).average_cost_milli
        average = average or self.predicted_units(entry, policy) * 1000
        return service.credit_milli(average, entry.weight_milli, policy.credit_requests)

    def lift_class(self, name: PriorityClass) -> None:
        """Bring a class that had nothing waiting up to the least pass of those that have; classes save up nothing."""
        active = [lane.pass_milli for lane in self.lanes.values() if lane.waiting]
        lane = self.lanes[name]
        lane.pass_milli = max(lane.pass_milli, min(active, default=self.pass_floor_milli))

    def overload_ms(self, slots: int, policy: service.Policy) -> int:
        """By how much the work that waits in the urgent classes takes longer than it should; 0 = it does not."""
        if not policy.overload_ms:
            return 0
        urgent = sum(lane.waiting for name, lane in self.lanes.items() if name is not PriorityClass.BATCH)
        return max(0, urgent * self.average_run_milli // (1000 * max(1, slots)) - policy.overload_ms)

    def next_class(self, slots: int, policy: service.Policy, now_ms: int) -> PriorityClass:
        """Stride scheduling (Waldspurger and Weihl, 1995) with ageing: the least pass, less what waiting earned.

        Batch pauses under overload, but none of its requests waits for that longer than `batch_pause_ms`. So starvation
        is impossible (invariant 4): every dispatch raises the pass of the class served, and a waiting class's discount
        only grows."""
        waiting = [name for name in CLASSES if self.lanes[name].waiting]
        if waiting[-1] is PriorityClass.BATCH and self.overload_ms(slots, policy):
            paused_ms = now_ms - self.lanes[PriorityClass.BATCH].oldest_ms()
            if paused_ms < policy.batch_pause_ms:
                waiting.pop()

        def urgency(name: PriorityClass) -> tuple[int, int]:
            lane = self.lanes[name]
            waited_ms = max(0, now_ms - lane.oldest_ms())
            return lane.pass_milli - policy.ageing_per_ms * waited_ms, CLASSES.index(name)

        return min(waiting, key=urgency)

    def charge_class(self, name: PriorityClass, units: int, policy: service.Policy) -> None:
        """Advance the class that was chosen."""
        lane = self.lanes[name]
        self.pass_floor_milli = max(self.pass_floor_milli, lane.pass_milli)
        lane.pass_milli += service.charge_milli(units, policy.share_milli(name))

    def correct_class(self, name: PriorityClass, before: int, after: int, policy: service.Policy) -> None:
        """Replace a charge of `before` units by `after`."""
        share = policy.share_milli(name)
        self.lanes[name].pass_milli += service.charge_milli(after, share) - service.charge_milli(before, share)


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


def lane_depths(versions: Mapping[VersionKey, VersionQueues]) -> tuple[LaneDepth, ...]:
    """Lanes with requests waiting, by version and class."""
    waiting = [
        (version, CLASSES.index(name), lane, queues.average_run_milli // 1000)
        for version, queues in versions.items()
        for name, lane in queues.lanes.items()
        if lane.waiting
    ]
    return tuple(
        LaneDepth(version, CLASSES[number], lane.waiting, lane.oldest_ms(), run_ms)
        for version, number, lane, run_ms in sorted(waiting, key=lambda each: each[:2])
    )

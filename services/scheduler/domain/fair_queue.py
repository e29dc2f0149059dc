"""The fair queue of one pool: who runs next. Pure; the oracle of the Redis store and the core of the simulator.

Each verb is one atomic decision, idempotent by attempt, and the Lua script of the same name in `adapters/scripts`
decides the same (tests/contract/test_scheduling_store.py compares every answer). An attempt goes
`queued → granted → ended`, or `queued → refused → ended`, or `granted → lapsed → ended`: refused and lapsed ones are
kept until their message (the refusal, the usage event) has arrived, so a crash of a replica loses none (invariant 1).
"""

from collections.abc import Sequence
from dataclasses import replace

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Outcome, PriorityClass
from services.scheduler.domain import service
from services.scheduler.domain.attempts import Attempt, VersionQueues, estimate_wait_ms, lane_depths, tombstone
from services.scheduler.domain.backlog import Backlog
from services.scheduler.domain.records import (
    AttemptId,
    Cancelled,
    Drain,
    Ending,
    Enqueued,
    Expired,
    Finish,
    InstanceKey,
    Known,
    LaneDepth,
    NotHeld,
    Offer,
    Part,
    PoolState,
    Progress,
    Queued,
    QueueEntry,
    RefusalReason,
    Room,
    Settled,
    Shed,
    Standing,
    Taken,
    Ticket,
    Tokens,
    TooLate,
    Turn,
    TurnDone,
    VersionKey,
)
from services.scheduler.domain.residency import Claim, ClaimOrder, DrainOrder, ResidencyBook
from services.scheduler.domain.seats import choose_seats
from services.scheduler.domain.service import Policy
from services.scheduler.domain.time_index import TimeIndex

FENCE_STEP_MS = 100  # the latest time is noted this coarsely, which saves the store a write
BATCH_MAX = 200  # tickets one expiry or claim hands out, so that no script runs long


class FairQueue:
    """One pool. `residency` holds what is known of drains and loads beside the queues."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.residency = ResidencyBook()
        self._versions: dict[VersionKey, VersionQueues] = {}
        self._waiting: dict[VersionKey, VersionQueues] = {}  # all with something queued, and some that had
        self._attempts: dict[AttemptId, Attempt] = {}
        self._backlog = Backlog()
        self._due = TimeIndex()  # outbox: what must still be delivered, and when to try (again)
        self._leases = TimeIndex()
        self._deadlines = TimeIndex()  # of queued attempts
        self._graves: dict[AttemptId, int] = {}
        self._arrivals = 0
        self._latest_ms = 0  # the latest time at which anybody handed something out
        self.in_use: dict[InstanceKey, int] = {}
        self.used_ms: dict[InstanceKey, int] = {}

    def turn(self, turn: Turn, now_ms: int) -> TurnDone:
        """Endings, then entries, then grants. Raises Unavailable as `take` does, and then does nothing."""
        if turn.limit:
            self._fence(now_ms)
        finishes = tuple(self.finish(each, now_ms) for each in turn.endings)
        enqueued = tuple(self.enqueue(entry, room, now_ms) for entry, room in turn.entries)
        taken = self.take(turn.offers, turn.limit, now_ms) if turn.limit else Taken()
        return TurnDone(finishes, enqueued, taken)

    def enqueue(self, entry: QueueEntry, room: Room, now_ms: int) -> Enqueued:
        """Queue an attempt. A refusal changes nothing (invariant 15)."""
        self._bury(now_ms)
        known = self._attempts.get(entry.attempt)
        if known is not None:
            return Known(known.standing)
        if full := self._backlog.full(entry, room):
            return full
        queues = self._versions.setdefault(entry.version, VersionQueues())
        if entry.priority_class is PriorityClass.BATCH and (over_ms := queues.overload_ms(room.slots, self.policy)):
            return Shed(over_ms)
        lane = queues.lanes[entry.priority_class]
        key = (entry.deadline_ms, self._arrivals + 1, entry.attempt)
        rank = lane.rank(entry.tenant_id, key)
        others = len(lane.queues) - (entry.tenant_id in lane.queues)
        wait_ms = room.start_after_ms + estimate_wait_ms(queues, lane, rank, room.slots, others)
        if now_ms + wait_ms > entry.deadline_ms or 0 < room.wait_most_ms < wait_ms:
            return TooLate(wait_ms)
        self._arrivals += 1
        self.residency.reclaim(entry.version)
        if not lane.waiting:
            queues.lift_class(entry.priority_class)
        if entry.tenant_id not in lane.queues:
            lane.lift(entry.tenant_id, queues.credit_milli(entry, self.policy))
        lane.add(entry.tenant_id, key, now_ms)
        self._waiting[entry.version] = queues
        self._attempts[entry.attempt] = Attempt(entry, key, now_ms)
        self._backlog.add(entry)
        self._deadlines.set(entry.attempt, entry.deadline_ms)
        return Queued(rank, wait_ms)

    def take(self, offers: Sequence[Offer], limit: int, now_ms: int) -> Taken:
        """Grant up to `limit` requests on the offered instances; no slot stays free that one could use (invariant 3).

        Each goes where its first token is expected first. What is past its deadline is refused instead. Raises
        Unavailable, and does nothing, if the caller's time is `stale_ms` behind: it was frozen and knows old things."""
        self._fence(now_ms)
        refused = self._refuse_overdue(now_ms)
        granted: list[Ticket] = []
        while len(granted) < limit:
            offer = self._least_loaded(offers, now_ms)
            if offer is None:
                break
            granted.append(self._grant(offer.version, offers, now_ms))
        return Taken(tuple(granted), refused)

    def finish(self, ending: Ending, now_ms: int) -> Finish:
        """Settle an attempt: slot free, service corrected to what was used. Idempotent."""
        attempt = self._attempts.get(ending.attempt)
        if attempt is None or attempt.standing not in (Standing.QUEUED, Standing.GRANTED):
            return NotHeld()
        if attempt.standing is Standing.QUEUED:
            self._unqueue(attempt)
        else:
            self._release(attempt, ending.used, ending.run_ms, now_ms)
            if ending.outcome is Outcome.DONE:
                self._learn(attempt, ending)
        self._end(attempt, now_ms)
        return Settled(attempt.entry.version)

    def cancel(self, attempt_id: AttemptId, now_ms: int) -> Cancelled:
        """Take an attempt out of its queue. Idempotent; one that overtakes its own submit is remembered."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            self._attempts[attempt_id] = tombstone(attempt_id, now_ms)
            self._graves[attempt_id] = now_ms + self.policy.tombstone_ms
            return Cancelled.UNKNOWN
        match attempt.standing:
            case Standing.QUEUED:
                self._unqueue(attempt)
                self._end(attempt, now_ms)
                return Cancelled.REMOVED
            case Standing.REFUSED:
                self._end(attempt, now_ms)
                return Cancelled.GONE
            case Standing.GRANTED:
                return Cancelled.RUNNING
            case Standing.LAPSED | Standing.ENDED:
                return Cancelled.GONE

    def renew(self, leases: Sequence[Progress], now_ms: int) -> tuple[AttemptId, ...]:
        """Extend leases and charge what was used beyond the prediction. Returns those that are not held."""
        missing: list[AttemptId] = []
        for progress in leases:
            attempt = self._attempts.get(progress.attempt)
            if attempt is None or attempt.standing is not Standing.GRANTED:
                missing.append(progress.attempt)
                continue
            attempt.used = progress.used
            if progress.used.output:
                self._leave_prefill(attempt, now_ms)
            attempt.lease_expires_ms = max(attempt.lease_expires_ms, now_ms + self.policy.lease_ms)
            self._leases.set(progress.attempt, attempt.lease_expires_ms)
            self._due.discard(progress.attempt)  # who renews a lease has its grant
            units = self._units(progress.used, now_ms - attempt.granted_ms)
            if units > attempt.units:
                self._correct(attempt, units)
        return tuple(missing)

    def expire(self, now_ms: int) -> Expired:
        """Refuse what is queued past its deadline; settle leases past their time from the last heartbeat."""
        self._bury(now_ms)
        refused = self._refuse_overdue(now_ms)
        lapsed: list[Ticket] = []
        for attempt_id in self._leases.ripe(now_ms, BATCH_MAX):
            attempt = self._attempts[attempt_id]
            ran_ms = attempt.lease_expires_ms - self.policy.lease_ms - attempt.granted_ms
            self._release(attempt, attempt.used, ran_ms, now_ms)
            attempt.standing, attempt.ended_ms = Standing.LAPSED, now_ms
            attempt.lease_expires_ms -= self.policy.lease_ms
            self._due.set(attempt_id, now_ms + self.policy.retry_ms)
            lapsed.append(attempt.ticket())
        self.residency.forget(now_ms)
        return Expired(refused, tuple(lapsed))

    def refuse(
        self, version: VersionKey, before_ms: int, reason: RefusalReason, message: str, now_ms: int
    ) -> tuple[Ticket, ...]:
        """Refuse what waits for a version with a deadline before `before_ms`, earliest deadline first."""
        waiting = [
            attempt_id
            for deadline_ms, attempt_id in self._deadlines.in_order()
            if deadline_ms < before_ms and self._attempts[attempt_id].entry.version == version
        ]
        return tuple(self._refuse(self._attempts[each], reason, message, now_ms) for each in waiting[:BATCH_MAX])

    def claim_due(self, now_ms: int) -> tuple[Ticket, ...]:
        """Grants, refusals and usage events that nobody acknowledged in time; the caller delivers them (again)."""
        due: list[Ticket] = []
        for attempt_id in self._due.ripe(now_ms, BATCH_MAX):
            attempt = self._attempts[attempt_id]
            if attempt.standing is Standing.REFUSED and now_ms - attempt.ended_ms >= self.policy.delivery_ms_max:
                self._end(attempt, now_ms)
                continue
            self._due.set(attempt_id, now_ms + self.policy.retry_ms)
            due.append(attempt.ticket())
        return tuple(due)

    def acknowledge(self, attempts: Sequence[AttemptId], now_ms: int) -> None:
        """The grant, refusal or usage event of each attempt arrived. Idempotent."""
        for attempt_id in attempts:
            if (attempt := self._attempts.get(attempt_id)) is None:
                continue
            self._due.discard(attempt_id)
            if attempt.standing in (Standing.REFUSED, Standing.LAPSED):
                self._end(attempt, now_ms)

    def depths(self) -> tuple[LaneDepth, ...]:
        """Lanes with requests waiting, by version and class."""
        self._waiting = {version: self._versions[version] for version in self._waiting if self.waiting(version)}
        return lane_depths(self._waiting)

    def waiting(self, version: VersionKey) -> int:
        """Requests that wait for a version."""
        queues = self._versions.get(version)
        return queues.waiting if queues else 0

    def service_milli(self, version: VersionKey, entry: QueueEntry) -> int:
        """The tenant's counter in the entry's lane."""
        return self._versions[version].lanes[entry.priority_class].account(entry.tenant_id).service_milli

    def _fence(self, now_ms: int) -> None:
        if now_ms < self._latest_ms - self.policy.stale_ms:
            raise Unavailable("this process's time is behind that of others")
        self._latest_ms = now_ms if now_ms > self._latest_ms + FENCE_STEP_MS else self._latest_ms

    def _units(self, used: Tokens, run_ms: int) -> int:
        """What was used, in the unit that the pool charges by."""
        if self.policy.device_time:
            return max(0, run_ms)
        return service.cost_units(used.input, used.cached, used.output)

    def _least_loaded(self, offers: Sequence[Offer], now_ms: int) -> Offer | None:
        best: Offer | None = None
        for offer in offers:
            used = self.in_use.get(offer.instance, 0)
            if offer.part is Part.PREFILL or not self.waiting(offer.version) or not self._is_free(offer, now_ms):
                continue
            if best is None or used * best.slots < self.in_use.get(best.instance, 0) * offer.slots:
                best = offer
        return best

    def _is_free(self, offer: Offer, now_ms: int) -> bool:
        used = self.in_use.get(offer.instance, 0)
        return used < offer.slots and self.residency.stands(offer, now_ms)

    def _grant(self, version: VersionKey, offers: Sequence[Offer], now_ms: int) -> Ticket:
        queues = self._versions[version]
        slots = sum(each.slots for each in offers if each.version == version and each.part is not Part.PREFILL)
        name = queues.next_class(slots, self.policy, now_ms)
        lane = queues.lanes[name]
        tenant_id = lane.next_tenant()
        attempt = self._attempts[lane.queues[tenant_id][0][2]]
        self._unqueue(attempt)
        entry, account = attempt.entry, lane.accounts[tenant_id]
        attempt.units = max(1, queues.predicted_units(entry, self.policy))
        attempt.epoch = account.epoch
        lane.charge(tenant_id, service.charge_milli(attempt.units, entry.weight_milli))
        queues.charge_class(name, attempt.units, self.policy)
        queues.running += 1
        free = [each for each in offers if each.version == version and self._is_free(each, now_ms)]
        seats = choose_seats(free, self.in_use, entry)
        attempt.instance, attempt.place = seats.main.instance, seats.main.place
        self._occupy(seats.main.instance, now_ms)
        if seats.prefill is not None:
            attempt.prefill, attempt.prefill_place = seats.prefill.instance, seats.prefill.place
            self._occupy(seats.prefill.instance, now_ms)
        self._backlog.note_dispatch(entry, now_ms)
        attempt.standing, attempt.granted_ms = Standing.GRANTED, now_ms
        attempt.lease_expires_ms = now_ms + self.policy.lease_ms
        self._leases.set(entry.attempt, attempt.lease_expires_ms)
        self._due.set(entry.attempt, now_ms + self.policy.retry_ms)
        return attempt.ticket()

    def _occupy(self, instance: InstanceKey, now_ms: int) -> None:
        self.in_use[instance] = self.in_use.get(instance, 0) + 1
        self.used_ms[instance] = now_ms

    def _vacate(self, instance: InstanceKey, now_ms: int) -> None:
        self.in_use[instance] -= 1
        self.used_ms[instance] = now_ms

    def _leave_prefill(self, attempt: Attempt, now_ms: int) -> None:
        """The first output token was decoded elsewhere: the prompt's instance is done with the request."""
        if attempt.prefill:
            self._vacate(attempt.prefill, now_ms)
            attempt.prefill = InstanceKey("")

    def _unqueue(self, attempt: Attempt) -> None:
        entry = attempt.entry
        self._versions[entry.version].lanes[entry.priority_class].remove(entry.tenant_id, attempt.key)
        self._backlog.remove(entry)
        self._deadlines.discard(entry.attempt)

    def _release(self, attempt: Attempt, used: Tokens, run_ms: int, now_ms: int) -> None:
        self._correct(attempt, self._units(used, run_ms))
        self._versions[attempt.entry.version].running -= 1
        self._vacate(attempt.instance, now_ms)
        self._leave_prefill(attempt, now_ms)
        self._leases.discard(attempt.entry.attempt)
        self._due.discard(attempt.entry.attempt)

    def _correct(self, attempt: Attempt, units: int) -> None:
        entry = attempt.entry
        queues = self._versions[entry.version]
        amount = service.charge_milli(units, entry.weight_milli) - service.charge_milli(
            attempt.units, entry.weight_milli
        )
        queues.lanes[entry.priority_class].correct(entry.tenant_id, amount, attempt.epoch)
        queues.correct_class(entry.priority_class, attempt.units, units, self.policy)
        attempt.units = units

    def _learn(self, attempt: Attempt, ending: Ending) -> None:
        queues = self._versions[attempt.entry.version]
        lane = queues.lanes[attempt.entry.priority_class]
        lane.learn(attempt.entry.tenant_id, ending.used.output, attempt.units)
        queues.average_output_milli = service.moved_average(queues.average_output_milli, ending.used.output)
        if ending.run_ms > 0:
            queues.average_run_milli = service.moved_average(queues.average_run_milli, ending.run_ms)

    def _refuse_overdue(self, now_ms: int) -> tuple[Ticket, ...]:
        overdue = self._deadlines.ripe(now_ms, BATCH_MAX)
        return tuple(self._refuse(self._attempts[each], RefusalReason.DEADLINE, "", now_ms) for each in overdue)

    def _refuse(self, attempt: Attempt, reason: RefusalReason, message: str, now_ms: int) -> Ticket:
        self._unqueue(attempt)
        attempt.standing, attempt.reason, attempt.message = Standing.REFUSED, reason.value, message
        attempt.ended_ms = now_ms
        self._due.set(attempt.entry.attempt, now_ms + self.policy.retry_ms)
        return attempt.ticket()

    def _end(self, attempt: Attempt, now_ms: int) -> None:
        attempt_id = attempt.entry.attempt
        attempt.standing, attempt.ended_ms = Standing.ENDED, now_ms
        attempt.entry = replace(attempt.entry, payload=b"")
        self._due.discard(attempt_id)
        self._graves[attempt_id] = now_ms + self.policy.tombstone_ms

    def _bury(self, now_ms: int) -> None:
        """Forget attempts that ended long ago; graves are in order of time."""
        while self._graves:
            attempt_id, until_ms = next(iter(self._graves.items()))
            if until_ms > now_ms:
                return
            del self._graves[attempt_id]
            del self._attempts[attempt_id]

    def begin_drain(self, order: DrainOrder, now_ms: int) -> Drain:
        """See `ResidencyBook.begin_drain`; who uses and who waits is known here. Raises Unavailable as `take` does."""
        self._fence(now_ms)
        in_use = self.in_use.get(order.instance, 0)
        return self.residency.begin_drain(order, in_use, self.waiting(order.version), now_ms)

    def send_drains(self, purpose: VersionKey, instances: Sequence[InstanceKey], until_ms: int, now_ms: int) -> bool:
        """See `ResidencyBook.send_drains`. Raises Unavailable as `take` does."""
        self._fence(now_ms)
        return self.residency.send_drains(purpose, instances, until_ms, now_ms)

    def claim_load(self, order: ClaimOrder, now_ms: int) -> Claim:
        """See `ResidencyBook.claim_load`. Raises Unavailable as `take` does."""
        self._fence(now_ms)
        return self.residency.claim_load(order, now_ms)

    def snapshot(self) -> PoolState:
        """Everything placement needs to know of the pool's queues."""
        book = self.residency
        return PoolState(
            revision=book.revision,
            depths=self.depths(),
            in_use={instance: count for instance, count in self.in_use.items() if count},
            used_ms=dict(self.used_ms),
            drains=dict(book.drains),
            loads=dict(book.loads),
            failures=dict(book.failures),
            owners=dict(book.owners),
        )

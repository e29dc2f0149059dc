"""`SchedulingStore` in memory: one `FairQueue` a pool. Passes the contract suite of the Redis store.

Shared by several scheduler replicas of one test, as Redis is by real ones. `away` makes every verb fail before it
happens.
"""

from collections.abc import Sequence

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import NodeId, PoolName
from services.scheduler.domain.fair_queue import FairQueue
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
from services.scheduler.domain.service import Policy


class InMemorySchedulingStore:
    """All pools of one test."""

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()
        self.pools: dict[PoolName, FairQueue] = {}
        self.away = False

    def queue(self, pool: PoolName) -> FairQueue:
        """The queue of a pool. Raises Unavailable while `away`."""
        if self.away:
            raise Unavailable("the store is away")
        return self.pools.setdefault(pool, FairQueue(self._policy))

    async def turn(self, pool: PoolName, turn: Turn, now_ms: int) -> TurnDone:
        return self.queue(pool).turn(turn, now_ms)

    async def enqueue(self, pool: PoolName, entry: QueueEntry, room: Room, now_ms: int) -> Enqueued:
        return self.queue(pool).enqueue(entry, room, now_ms)

    async def take(self, pool: PoolName, offers: Sequence[Offer], limit: int, now_ms: int) -> Taken:
        return self.queue(pool).take(offers, limit, now_ms)

    async def finish(self, pool: PoolName, endings: Sequence[Ending], now_ms: int) -> tuple[Finish, ...]:
        queue = self.queue(pool)
        return tuple(queue.finish(each, now_ms) for each in endings)

    async def cancel(self, pool: PoolName, attempt: AttemptId, now_ms: int) -> Cancelled:
        return self.queue(pool).cancel(attempt, now_ms)

    async def renew(self, pool: PoolName, leases: Sequence[Progress], now_ms: int) -> tuple[AttemptId, ...]:
        return self.queue(pool).renew(leases, now_ms)

    async def expire(self, pool: PoolName, now_ms: int) -> Expired:
        return self.queue(pool).expire(now_ms)

    async def refuse(
        self, pool: PoolName, version: VersionKey, before_ms: int, reason: RefusalReason, message: str, now_ms: int
    ) -> tuple[Ticket, ...]:
        return self.queue(pool).refuse(version, before_ms, reason, message, now_ms)

    async def claim_due(self, pool: PoolName, now_ms: int) -> tuple[Ticket, ...]:
        return self.queue(pool).claim_due(now_ms)

    async def acknowledge(self, pool: PoolName, attempts: Sequence[AttemptId], now_ms: int) -> None:
        self.queue(pool).acknowledge(attempts, now_ms)

    async def begin_drain(self, pool: PoolName, order: DrainOrder, now_ms: int) -> Drain:
        return self.queue(pool).begin_drain(order, now_ms)

    async def send_drains(
        self, pool: PoolName, purpose: VersionKey, instances: Sequence[InstanceKey], until_ms: int, now_ms: int
    ) -> bool:
        return self.queue(pool).send_drains(purpose, instances, until_ms, now_ms)

    async def clear_drain(
        self, pool: PoolName, instance: InstanceKey, now_ms: int, purpose: VersionKey | None = None
    ) -> None:
        self.queue(pool).residency.clear_drain(instance, purpose)

    async def claim_load(self, pool: PoolName, order: ClaimOrder, now_ms: int) -> Claim:
        return self.queue(pool).claim_load(order, now_ms)

    async def renew_load(self, pool: PoolName, version: VersionKey, owner: str, until_ms: int, now_ms: int) -> bool:
        return self.queue(pool).residency.renew_load(version, owner, until_ms)

    async def release_load(
        self,
        pool: PoolName,
        version: VersionKey,
        node_id: NodeId,
        owner: str,
        failure: LoadFailure | None,
        now_ms: int,
    ) -> None:
        self.queue(pool).residency.release_load(version, node_id, owner, failure)

    async def snapshot(self, pool: PoolName, now_ms: int) -> PoolState:
        return self.queue(pool).snapshot()

"""One lane: the tenants that wait for one model version in one class, and what each has received there.

A lane is the "same capacity" of invariant 2. Who has the least service goes next, of equals who was served longest ago;
inside a tenant the earliest deadline, then the order of arrival. A tenant that comes back from idle is lifted to the
lane's minimum less its burst credit (invariant 5). No tenant starves: every dispatch raises the counter of whoever was
served, and a returning tenant gets ahead of a waiting one by its credit once, because afterwards its own counter is the
higher one.

A lift closes the account of what came before: a refund for a request that was dispatched before the lift is dropped,
else a tenant could save up more than its credit in overcharged requests.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from roundhouse.vocabulary import TenantId
from services.scheduler.domain import service
from services.scheduler.domain.records import AttemptId

QueueKey = tuple[int, int, AttemptId]  # deadline, arrival number, attempt


@dataclass(slots=True)
class Account:
    """One tenant in one lane."""

    service_milli: int = 0
    epoch: int = 0  # number of lifts
    turn: int = 0  # which of the lane's dispatches it got last
    average_output_milli: int = 0
    average_cost_milli: int = 0


@dataclass(slots=True)
class Lane:
    """Mutable; owned by one `FairQueue`."""

    pass_milli: int = 0  # stride of the class at this version
    floor_milli: int = 0  # counter of whoever was served last: the minimum to use when nobody waits
    turns: int = 0  # dispatches so far
    waiting: int = 0
    accounts: dict[TenantId, Account] = field(default_factory=dict)
    queues: dict[TenantId, list[QueueKey]] = field(default_factory=dict)
    _arrivals: list[tuple[int, int, AttemptId]] = field(default_factory=list)
    _left: set[AttemptId] = field(default_factory=set)

    def account(self, tenant_id: TenantId) -> Account:
        """The tenant's account, opened at zero."""
        return self.accounts.setdefault(tenant_id, Account())

    def add(self, tenant_id: TenantId, key: QueueKey, enqueued_ms: int) -> None:
        """Queue one attempt."""
        insort(self.queues.setdefault(tenant_id, []), key)
        heapq.heappush(self._arrivals, (enqueued_ms, key[1], key[2]))
        self.waiting += 1

    def remove(self, tenant_id: TenantId, key: QueueKey) -> None:
        """Take one queued attempt out."""
        queue = self.queues[tenant_id]
        queue.pop(bisect_left(queue, key))
        if not queue:
            del self.queues[tenant_id]
        self._left.add(key[2])
        self.waiting -= 1
        if not self.waiting:
            self._arrivals.clear()
            self._left.clear()

    def rank(self, tenant_id: TenantId, key: QueueKey) -> int:
        """Requests of the tenant that go before `key`."""
        return bisect_left(self.queues.get(tenant_id, []), key)

    def oldest_ms(self) -> int:
        """When the oldest waiting attempt was queued. The lane must not be empty."""
        while self._arrivals[0][2] in self._left:
            self._left.discard(heapq.heappop(self._arrivals)[2])
        return self._arrivals[0][0]

    def minimum_milli(self) -> int:
        """The least service among waiting tenants; the floor if nobody waits."""
        return min((self.accounts[tenant].service_milli for tenant in self.queues), default=self.floor_milli)

    def lift(self, tenant_id: TenantId, credit_milli: int) -> None:
        """Bring a returning tenant up to the minimum less its credit."""
        account = self.account(tenant_id)
        least = self.minimum_milli() - credit_milli
        if account.service_milli < least:
            account.service_milli = least
            account.epoch += 1

    def next_tenant(self) -> TenantId:
        """The waiting tenant with the least service; of equals who was served longest ago, then by name."""

        def rank(tenant_id: TenantId) -> tuple[int, int, TenantId]:
            account = self.accounts[tenant_id]
            return account.service_milli, account.turn, tenant_id

        return min(self.queues, key=rank)

    def charge(self, tenant_id: TenantId, amount_milli: int) -> None:
        """Charge a dispatch to the tenant that was chosen."""
        account = self.accounts[tenant_id]
        self.floor_milli = max(self.floor_milli, account.service_milli)
        account.service_milli += amount_milli
        self.turns += 1
        account.turn = self.turns

    def correct(self, tenant_id: TenantId, amount_milli: int, epoch: int) -> None:
        """Correct an earlier charge; a refund from before the last lift is dropped."""
        account = self.account(tenant_id)
        if amount_milli > 0 or account.epoch == epoch:
            account.service_milli += amount_milli

    def learn(self, tenant_id: TenantId, output_tokens: int, units: int) -> None:
        """Take a finished request into the tenant's averages."""
        account = self.account(tenant_id)
        account.average_output_milli = service.moved_average(account.average_output_milli, output_tokens)
        account.average_cost_milli = service.moved_average(account.average_cost_milli, units)

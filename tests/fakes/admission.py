"""In-memory admission, keys and directory over the pure twins. They pass the contract suites of the real adapters."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from roundhouse.catalogue.records import Limits
from roundhouse.clock import Clock
from roundhouse.errors import Conflict, NotFound, Unauthenticated, Unavailable
from roundhouse.vocabulary import KeyId, RequestId, TenantId
from services.gateway.adapters.admission import budget_exhausted, limit_exceeded
from services.gateway.domain import budgets, keys, limits
from services.gateway.domain.keys import KeyRecord
from services.gateway.domain.limits import ScopedLimits
from services.gateway.ports import NO_COSTS, Admitted, Caller


class InMemoryKeys:
    """`KeyRegistry` and `KeyDirectory` in one; `away` makes every call raise Unavailable."""

    def __init__(self, clock: Clock, *, admin_key_hash: str = "") -> None:
        self.away = False
        self._clock = clock
        self._admin_key_hash = admin_key_hash
        self._records: dict[KeyId, KeyRecord] = {}

    async def add(self, record: KeyRecord) -> None:
        """See `KeyRegistry.add`."""
        self._check()
        self._records[record.key_id] = record

    async def revoke(self, key_id: KeyId, now_ms: int) -> KeyRecord:
        """See `KeyRegistry.revoke`."""
        self._check()
        if key_id not in self._records:
            raise NotFound("there is no such key", code="key_not_found")
        record = self._records[key_id]
        self._records[key_id] = replace(record, revoked_ms=record.revoked_ms or now_ms)
        return self._records[key_id]

    async def find(self, key_id: KeyId) -> KeyRecord:
        """See `KeyRegistry.find`."""
        self._check()
        if key_id not in self._records:
            raise NotFound("there is no such key", code="key_not_found")
        return self._records[key_id]

    async def end_at(self, key_id: KeyId, at_ms: int, *, now_ms: int) -> KeyRecord:
        """See `KeyRegistry.end_at`."""
        record = await self.find(key_id)
        if not record.revoked_ms:
            self._records[key_id] = keys.ends_at(record, at_ms)
        return self._records[key_id]

    async def of_tenant(self, tenant_id: TenantId) -> list[KeyRecord]:
        """See `KeyRegistry.of_tenant`."""
        self._check()
        return [record for record in self._records.values() if record.tenant_id == tenant_id]

    async def identify(self, key_text: str, *, fresh: bool = False) -> Caller:
        """See `KeyDirectory.identify`; always fresh."""
        self._check()
        key_hash = keys.key_hash(key_text)
        if self._admin_key_hash and key_hash == self._admin_key_hash:
            return Caller(keys.OPERATORS, keys.BOOTSTRAP_KEY_ID, frozenset({keys.ADMIN}), key_hash)
        record = next((one for one in self._records.values() if one.key_hash == key_hash), None)
        if record is None or record.state(self._clock.now_ms()) != "active":
            raise Unauthenticated("the API key is not valid")
        return Caller(record.tenant_id, record.key_id, record.scopes, key_hash, record.limits, family=record.family)

    def is_alive(self, tenant_id: TenantId, key_hash: str) -> bool:
        """What admission asks."""
        now_ms = self._clock.now_ms()
        return any(
            record.tenant_id == tenant_id and record.key_hash == key_hash and record.state(now_ms) == "active"
            for record in self._records.values()
        )

    def _check(self) -> None:
        if self.away:
            raise Unavailable("keys cannot be checked now")


class InMemoryAdmission:
    """`Admission` over `domain.limits`; `away` makes every call raise Unavailable."""

    def __init__(self, clock: Clock, key_registry: InMemoryKeys) -> None:
        self.away = False
        self.purses: dict[tuple[TenantId, str], budgets.Purse] = defaultdict(budgets.Purse)  # by tenant and scope
        self.uses: dict[TenantId, limits.TenantUse] = defaultdict(limits.TenantUse)
        self._clock = clock
        self._keys = key_registry

    async def admit(
        self,
        caller: Caller,
        request_id: RequestId,
        limits: Limits,
        *,
        input_tokens: int,
        reserve_tokens: int,
        also: Sequence[ScopedLimits] = (),
        money: Sequence[budgets.Money] = (),
    ) -> Admitted:
        """See `Admission.admit`."""
        self._check()
        assert 0 <= input_tokens <= reserve_tokens
        if not self._is_alive(caller):
            raise Unauthenticated("the API key is not valid")
        use = self.uses[caller.tenant_id]
        purses = {}
        if request_id not in use.tickets and request_id not in use.ended:
            purses = {(caller.tenant_id, each.scope): self._reserved(caller, request_id, each) for each in money}
        after, answer = _admit(use, request_id, reserve_tokens, limits, also, self._clock.now_ms())
        self.uses[caller.tenant_id] = after
        self.purses.update(purses)
        return Admitted(
            ticket=request_id,
            tenant_id=caller.tenant_id,
            reserved_tokens=reserve_tokens,
            remaining_requests=answer.remaining_requests,
            remaining_tokens=answer.remaining_tokens,
            reset_requests_ms=answer.reset_requests_ms,
            reset_tokens_ms=answer.reset_tokens_ms,
            requests_limit=answer.requests_limit,
            tokens_limit=answer.tokens_limit,
        )

    def _is_alive(self, caller: Caller) -> bool:
        if not caller.key_hash:
            return not keys.has_expired(caller.expires_ms, self._clock.now_ms())
        return self._keys.is_alive(caller.tenant_id, caller.key_hash)

    def _reserved(self, caller: Caller, request_id: RequestId, money: budgets.Money) -> budgets.Purse:
        now_ms, purse = self._clock.now_ms(), self.purses[caller.tenant_id, money.scope]
        answer = purse.admit(request_id, money.cost_micro, money.limit_micro, now_ms)
        if isinstance(answer, budgets.Refused):
            raise budget_exhausted(money, purse.spent, answer.reserved)
        return answer

    async def settle(self, admitted: Admitted, *, used_tokens: int, costs: Mapping[str, int] = NO_COSTS) -> None:
        """See `Admission.settle`."""
        self._check()
        use = self.uses[admitted.tenant_id]
        self._change(
            admitted.tenant_id,
            admitted.ticket,
            lambda purse, scope: purse.settle(admitted.ticket, costs.get(scope, 0), self._clock.now_ms()),
        )
        self.uses[admitted.tenant_id] = limits.settle(use, admitted.ticket, used_tokens, self._clock.now_ms())

    async def withdraw(self, tenant_id: TenantId, request_id: RequestId) -> None:
        """Undo an admission entirely."""
        self._check()
        self._change(tenant_id, request_id, lambda purse, _: purse.settle(request_id, 0, self._clock.now_ms()))
        self.uses[tenant_id] = limits.withdraw(self.uses[tenant_id], request_id, self._clock.now_ms())

    async def renew(self, held: Sequence[Admitted]) -> None:
        """See `Admission.renew`."""
        self._check()
        for admitted in held:
            use = self.uses[admitted.tenant_id]
            self.uses[admitted.tenant_id] = limits.renew(use, admitted.ticket, self._clock.now_ms())
            self._renew_money(admitted)

    def _renew_money(self, admitted: Admitted) -> None:
        now_ms = self._clock.now_ms()
        self._change(admitted.tenant_id, admitted.ticket, lambda purse, _: purse.renew(admitted.ticket, now_ms))

    def _change(
        self, tenant_id: TenantId, ticket: RequestId, change: Callable[[budgets.Purse, str], budgets.Purse]
    ) -> None:
        """Every purse of a request that has not ended."""
        if ticket in self.uses[tenant_id].tickets:
            for (owner, scope), purse in self.purses.items():
                if owner == tenant_id:
                    self.purses[owner, scope] = change(purse, scope)

    async def aclose(self) -> None:
        """Nothing runs in the background here."""

    def running(self, tenant_id: TenantId) -> int:
        """Concurrency leases that are held now."""
        return self.uses[tenant_id].running(self._clock.now_ms())

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the store did not run admission.lua")


def _admit(
    use: limits.TenantUse,
    request_id: RequestId,
    reserve_tokens: int,
    wanted: Limits,
    also: Sequence[ScopedLimits],
    now_ms: int,
) -> tuple[limits.TenantUse, limits.Room]:
    ask = limits.Ask(
        request_id,
        reserve_tokens,
        wanted.requests_per_minute,
        wanted.tokens_per_minute,
        wanted.concurrent_requests,
        tuple(also),
    )
    after, answer = limits.admit(use, ask, now_ms)
    match answer:
        case limits.Taken(room):
            return after, room
        case limits.Ended():
            raise Conflict("this request id was used before")
        case limits.Refused(limit, wait_ms, scope):
            [refusing] = [one for one in ask.scopes if one.scope == scope]
            raise limit_exceeded(limit, -1 if wait_ms is None else wait_ms, refusing)

"""`AnswerStore` in memory. It passes the contract suite of the real one."""

from dataclasses import dataclass

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import TenantId
from services.gateway.domain.idempotency import (
    ANSWER_BYTES_MAX,
    KEPT_MS,
    LEASE_MS,
    TENANT_ANSWERS_MAX,
    TENANT_BYTES_MAX,
    Answer,
    Busy,
    Claim,
    Claimed,
    Differs,
    Full,
    Kept,
)


@dataclass
class _Entry:
    fingerprint: str
    ends_ms: int
    owner: str | None  # None: answered
    until_ms: int = 0
    answer: Answer | None = None


class InMemoryAnswerStore:
    """`away` makes every call raise Unavailable."""

    def __init__(self, clock: Clock) -> None:
        self.away = False
        self._clock = clock
        self._entries: dict[tuple[TenantId, str], _Entry] = {}

    async def claim(self, tenant_id: TenantId, key: str, fingerprint: str, owner: str) -> Claim:
        """See `AnswerStore.claim`."""
        now_ms = self._now()
        self._entries = {name: entry for name, entry in self._entries.items() if entry.ends_ms > now_ms}
        entry = self._entries.get((tenant_id, key))
        if entry is None:
            own = [one for (tenant, _), one in self._entries.items() if tenant == tenant_id]
            size = sum(len(one.answer.body) for one in own if one.answer is not None)
            if len(own) >= TENANT_ANSWERS_MAX or size >= TENANT_BYTES_MAX:
                return Full(min(one.ends_ms for one in own) - now_ms)
            entry = self._entries[tenant_id, key] = _Entry(fingerprint, now_ms + KEPT_MS, owner)
        elif entry.fingerprint != fingerprint:
            return Differs()
        elif entry.owner is None:
            return Kept(entry.answer)
        elif entry.owner != owner and entry.until_ms > now_ms:
            return Busy()
        entry.owner, entry.until_ms = owner, now_ms + LEASE_MS
        return Claimed()

    async def renew(self, tenant_id: TenantId, key: str, owner: str) -> None:
        """See `AnswerStore.renew`."""
        if (entry := self._own(tenant_id, key, owner)) is not None:
            entry.until_ms = self._now() + LEASE_MS

    async def keep(self, tenant_id: TenantId, key: str, owner: str, answer: Answer) -> None:
        """See `AnswerStore.keep`."""
        if (entry := self._own(tenant_id, key, owner)) is not None:
            entry.owner = None
            entry.answer = answer if len(answer.body) <= ANSWER_BYTES_MAX else None

    async def release(self, tenant_id: TenantId, key: str, owner: str) -> None:
        """See `AnswerStore.release`."""
        if self._own(tenant_id, key, owner) is not None:
            del self._entries[tenant_id, key]

    async def erase(self, tenant_id: TenantId) -> int:
        """See `AnswerStore.erase`."""
        self._now()
        gone = [name for name in self._entries if name[0] == tenant_id]
        for name in gone:
            del self._entries[name]
        return len(gone)

    def _own(self, tenant_id: TenantId, key: str, owner: str) -> _Entry | None:
        self._now()
        entry = self._entries.get((tenant_id, key))
        return entry if entry is not None and entry.owner == owner else None

    def _now(self) -> int:
        if self.away:
            raise Unavailable("the store did not run answers.lua")
        return self._clock.now_ms()

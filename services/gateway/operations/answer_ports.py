"""Where answers are kept for repeated requests."""

from typing import Protocol

from roundhouse.vocabulary import TenantId
from services.gateway.domain.idempotency import Answer, Claim


class AnswerStore(Protocol):
    """Claims and kept answers, one of each key of a tenant. Every call is one atomic step."""

    async def claim(self, tenant_id: TenantId, key: str, fingerprint: str, owner: str) -> Claim:
        """Take the key for `owner`, or say who or what has it. Idempotent by owner. Raises Unavailable."""
        ...

    async def renew(self, tenant_id: TenantId, key: str, owner: str) -> None:
        """Keep a claim for `LEASE_MS` from now. Raises Unavailable."""
        ...

    async def keep(self, tenant_id: TenantId, key: str, owner: str, answer: Answer) -> None:
        """End a claim with its answer, if `owner` still has it; one that is too long is not kept, but known.

        Idempotent. Raises Unavailable."""
        ...

    async def release(self, tenant_id: TenantId, key: str, owner: str) -> None:
        """End a claim without an answer, if `owner` still has it: the next one runs. Idempotent. Raises Unavailable."""
        ...

    async def erase(self, tenant_id: TenantId) -> int:
        """Forget everything of a tenant; how many keys there were. Raises Unavailable."""
        ...

"""Removes what the gateway keeps of a tenant's texts: answers kept for repeated requests, files and batches.

The caches of the nodes are erased by `erase_cache`, the ledger's single requests by metering.
"""

from dataclasses import dataclass

from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.operations.admin_ports import AuditTrail
from services.gateway.operations.answer_ports import AnswerStore
from services.gateway.operations.batches import BatchOperations


@dataclass(frozen=True, slots=True)
class Erased:
    """How much there was."""

    answers: int
    files_and_batches: int


class StoredErasure:
    """`batches` None: this gateway has no files and batches."""

    def __init__(self, answers: AnswerStore, batches: BatchOperations | None, audit: AuditTrail) -> None:
        self._answers = answers
        self._batches = batches
        self._audit = audit

    async def erase(self, tenant: str, *, actor: KeyId) -> Erased:
        """Remove it all. Idempotent; a tenant that is gone can be erased too. Raises Unavailable: then erase again."""
        tenant_id = TenantId(tenant)
        answers = await self._answers.erase(tenant_id)
        others = await self._batches.erase(tenant_id) if self._batches is not None else 0
        details = {"answers": str(answers), "files_and_batches": str(others)}
        await self._audit.record("stored_erased", actor=actor, subject=tenant, details=details)
        return Erased(answers, others)

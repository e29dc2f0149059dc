"""What the ledger must not know again: tenants that were erased, and single requests that are past their retention.

An erased tenant's later events (repeats, or ones that were under way) are recorded under its pseudonym, so that they
still count once and totals stay. An event from before what is retained of its tenant cannot be told from a repeat any
more; it is put aside, never counted on a guess. The pseudonym is chance, not derived from the name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from msgspec.structs import replace

from services.metering.domain.ledger import Candidate, Rejected
from services.metering.domain.usage import UsageFacts

PSEUDONYM_MARK: Final = "~"
"""Begins every pseudonym. No tenant is named so: names begin with a letter or digit."""
ERASED_ADAPTER: Final = "erased"
"""In place of an adapter's name, which may name its owner. That there was one still shows."""


def tenant_hash(tenant_id: str) -> str:
    """How an erased tenant is recognised without its name: SHA-256, hex."""
    return sha256(b"roundhouse/erased/v1\x00" + tenant_id.encode()).hexdigest()


def pseudonymised(facts: UsageFacts, pseudonym: str) -> UsageFacts:
    """The event without tenant, key and adapter. What is counted, when, and its own id stay. Idempotent."""
    adapter = ERASED_ADAPTER if facts.adapter else ""
    return replace(facts, tenant_id=pseudonym, key_id="", adapter=adapter, adapter_digest="")


def is_pseudonym(tenant_id: str) -> bool:
    """Whether this stands for an erased tenant."""
    return tenant_id.startswith(PSEUDONYM_MARK)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """As of `changes`, the ledger's count of erasures and removals."""

    changes: int = 0
    pseudonyms: Mapping[str, str] = field(default_factory=dict)  # by tenant hash
    removed_before_ms: Mapping[str, int] = field(default_factory=dict)  # by tenant

    def applied_to(self, items: Sequence[Candidate | Rejected]) -> Sequence[Candidate | Rejected]:
        """The same items as they may be recorded. O(n); returns `items` itself if there is nothing to forget."""
        if not self.changes:
            return items
        return [item if isinstance(item, Rejected) else self._of(item) for item in items]

    def _of(self, item: Candidate) -> Candidate | Rejected:
        facts = item.facts
        pseudonym = self.pseudonyms.get(tenant_hash(facts.tenant_id))
        if pseudonym is not None:
            facts = pseudonymised(facts, pseudonym)
            item = replace(item, facts=facts)
        if facts.time_ms < self.removed_before_ms.get(facts.tenant_id, 0):
            return Rejected(item.raw, "it is older than what is retained of its tenant, so it may be a repeat")
        return item

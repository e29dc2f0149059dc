"""Tells who left the disk or host memory so that something else fits: counted, and in the audit stream with the reason.

All let go of what nobody uses, least recently used first; `CacheTiers` and `Adapters` choose, this only says it.
"""

from collections.abc import Sequence

from roundhouse.clock import Clock
from roundhouse.vocabulary import AdapterName, Digest
from services.loader.domain.contents import ContentLedger
from services.loader.domain.versions import ModelVersion
from services.loader.operations.node import Node
from services.loader.ports import AuditNote, AuditTrail, Measurements

REASON = "nobody used it, and it was used least recently"


class Leavers:
    """See the module."""

    def __init__(self, node: Node, audit: AuditTrail, measurements: Measurements, clock: Clock) -> None:
        self._node = node
        self._audit = audit
        self._measurements = measurements
        self._clock = clock

    def leave_disk(self, digests: Sequence[Digest], heir: Digest) -> None:
        """These go from the disk for `heir`; to be told while the account still has them."""
        for digest in digests:
            self._tell("disk", digest, heir, self._node.disk, self._node.disk_used_ms.get(digest, 0))

    def leave_host(self, digests: Sequence[Digest], heir: Digest) -> None:
        """These go from host memory for `heir`; to be told while the account still has them."""
        for digest in digests:
            self._tell("host", digest, heir, self._node.host.ledger, self._node.host_used_ms.get(digest, 0))

    def leave_shelf(self, adapter: AdapterName | None, digest: Digest, heir: Digest) -> None:
        """An adapter's copy in host memory goes for that of `heir`; to be told while the account still has it."""
        stock = self._node.adapters
        size = stock.host.held_by(digest).resident
        details = {"tier": "adapters", "digest": digest, "made_room_for": heir} | (
            {"adapter": adapter} if adapter else {}
        )
        self._record(None, details, size, size, stock.used_ms.get(digest, 0))

    def _tell(self, tier: str, digest: Digest, heir: Digest, ledger: ContentLedger, used_ms: int) -> None:
        version = next((home.instance.version for home in self._node.sharing(digest)), None)
        held = [ledger.pieces[key] for key in ledger.contents[digest]]
        size = sum(piece.size for piece in held)
        freed = sum(piece.size for piece in held if piece.holders == {digest})
        self._record(version, {"tier": tier, "digest": digest, "made_room_for": heir}, size, freed, used_ms)

    def _record(
        self, version: ModelVersion | None, details: dict[str, str], size: int, freed: int, used_ms: int
    ) -> None:
        self._measurements.evicted(details["tier"])
        idle_ms = max(0, self._clock.now_ms() - used_ms)
        details |= {"bytes": str(size), "bytes_freed": str(freed), "idle_ms": str(idle_ms)}
        self._audit.record(AuditNote("evict", version, REASON, details))

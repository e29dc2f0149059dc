"""Leases on blocks: rights to read or to write that end by themselves.

Invariant 12: no lease outlives its time. `expired` gives out every lease whose time is up, and whoever keeps the book
asks it before doing anything else.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.domain.records import Block, Holder

LEASE_MS_MAX = 60_000  # guess: a prefill result may wait this long for its decode; a dead client holds no longer


@dataclass(frozen=True, slots=True)
class Lease:
    """`chain`: the blocks it pins, from the first of the prompt downwards. `writing`: those of them to be written.

    A lease without `writing` is one to read the chain. A writer pins what is above its blocks, because that must not
    go before they come.
    """

    lease_id: str
    client_id: str
    expires_ms: int
    chain: tuple[Block, ...]
    writing: tuple[Block, ...]


class LeaseBook:
    """All leases of one table. Ids start with `prefix`, so that those of another process are unknown here."""

    def __init__(self, prefix: str) -> None:
        """An empty book."""
        self._prefix = prefix
        self._count = 0
        self._leases: dict[str, Lease] = {}
        self._by_end: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, holder: Holder, now_ms: int, chain: Sequence[Block], writing: Sequence[Block] = ()) -> Lease:
        """Grant a lease of 1 ms to `LEASE_MS_MAX`."""
        self._count += 1
        ends = now_ms + max(1, min(holder.lease_ms, LEASE_MS_MAX))
        lease = Lease(f"{self._prefix}-{self._count}", holder.client_id, ends, tuple(chain), tuple(writing))
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._by_end, (ends, lease.lease_id))
        return lease

    def find(self, lease_id: str) -> Lease | None:
        """The lease, if it is still open."""
        return self._leases.get(lease_id)

    def chain_of(self, lease_id: str) -> tuple[Block, ...]:
        """The blocks that an open lease pins; none if it has ended."""
        lease = self._leases.get(lease_id)
        return lease.chain if lease is not None else ()

    def close(self, lease_id: str) -> Lease | None:
        """End a lease; None if it has ended before. Idempotent."""
        return self._leases.pop(lease_id, None)

    def expired(self, now_ms: int) -> list[Lease]:
        """End every lease whose time is up, and give them out, earliest first."""
        ended: list[Lease] = []
        while self._by_end and self._by_end[0][0] <= now_ms:
            lease = self._leases.pop(heapq.heappop(self._by_end)[1], None)
            if lease is not None:
                ended.append(lease)
        return ended

"""Chains that are pinned under a name of the caller's choice: the result of a prefill until decode claims it.

A hold is a lease that somebody else than its maker can renew or end, by (salt, handle); it outlives its maker's
connection and request, and ends by itself (invariant 12). Knows nothing of requests or nodes.
"""

from collections.abc import Sequence

from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import NOTHING_SHARED, Acquired, Holder, Missed, Shared

HOLDS_MIN = 64  # not looked through for ended ones


class HoldBook:
    """The holds over one table."""

    def __init__(self, table: BlockTable) -> None:
        """Nothing is held."""
        self._table = table
        self._leases: dict[tuple[bytes, str], str] = {}
        self._look_at = HOLDS_MIN

    def hold(
        self, salt: bytes, keys: Sequence[bytes], handle: Holder, now_ms: int, shared: Shared = NOTHING_SHARED
    ) -> int:
        """Pin the stored run of `keys` until `handle.lease_ms` from now; how many blocks that are.

        Idempotent by (salt, handle): the later call replaces the earlier one. A run of 0 leaves the earlier one."""
        outcome = self._table.lease(salt, keys, handle, now_ms, shared)
        if isinstance(outcome, Missed):
            return 0
        assert isinstance(outcome, Acquired)
        self.release(salt, handle.client_id, now_ms)
        self._leases[salt, handle.client_id] = outcome.lease_id
        if len(self._leases) > self._look_at:  # those that ended by themselves leave nothing else behind
            self._look_at = HOLDS_MIN + 2 * self.count()
        return len(outcome.blocks)

    def release(self, salt: bytes, handle: str, now_ms: int) -> bool:
        """End a hold; whether there was one that had not ended by itself. Idempotent."""
        lease_id = self._leases.pop((salt, handle), None)
        if lease_id is None:
            return False
        alive = self._table.is_open(lease_id)
        self._table.release(lease_id, now_ms)
        return alive

    @property
    def remembered(self) -> int:
        """Holds that have not ended, and some that have."""
        return len(self._leases)

    def count(self) -> int:
        """Holds that have not ended. O(holds)."""
        ended = [name for name, lease_id in self._leases.items() if not self._table.is_open(lease_id)]
        for name in ended:
            del self._leases[name]
        return len(self._leases)

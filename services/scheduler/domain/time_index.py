"""Attempts by time: what is due, in order of time and then of name. A heap with lazy deletion; O(log n) a change."""

import heapq

from services.scheduler.domain.records import AttemptId


class TimeIndex:
    """The in-memory twin of a sorted set whose scores are times."""

    def __init__(self) -> None:
        self._times: dict[AttemptId, int] = {}
        self._heap: list[tuple[int, AttemptId]] = []

    def set(self, attempt_id: AttemptId, time_ms: int) -> None:
        """Put or move an attempt."""
        self._times[attempt_id] = time_ms
        heapq.heappush(self._heap, (time_ms, attempt_id))

    def discard(self, attempt_id: AttemptId) -> None:
        """Take an attempt out. Idempotent."""
        self._times.pop(attempt_id, None)

    def ripe(self, now_ms: int, limit: int) -> list[AttemptId]:
        """Up to `limit` attempts due by `now_ms`. They stay in: each must be moved or discarded by the caller."""
        found: dict[AttemptId, int] = {}
        while self._heap and self._heap[0][0] <= now_ms and len(found) < limit:
            time_ms, attempt_id = heapq.heappop(self._heap)
            if self._times.get(attempt_id) == time_ms:
                found[attempt_id] = time_ms
        return list(found)

    def in_order(self) -> list[tuple[int, AttemptId]]:
        """Everything, earliest first. O(n log n)."""
        return sorted((time_ms, attempt_id) for attempt_id, time_ms in self._times.items())

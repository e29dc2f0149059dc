"""What each tenant has queued in a pool, in requests and in tokens, and how fast that drains: who is told "full".

The same for each of its keys, and for what it calls each model by, where those have limits of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundhouse.vocabulary import TenantId
from services.scheduler.domain import service
from services.scheduler.domain.records import QueueEntry, QueueFull, Room

RETRY_UNKNOWN_MS = 1_000  # Retry-After of a full queue that has not drained yet; a guess


@dataclass(slots=True)
class Pace:
    """How fast a queue drains."""

    last_ms: int = 0  # of the last dispatch that left requests behind; 0 = none
    average_milli: int = 0  # ms between such dispatches, in thousandths


@dataclass(slots=True)
class Depth:
    """What one queue holds."""

    requests: int = 0
    tokens: int = 0
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True)
class Backlog:
    """Mutable; owned by one `FairQueue`. A queue is a tenant's (scope ""), or that of one of its scopes."""

    _queues: dict[tuple[TenantId, str], Depth] = field(default_factory=dict)

    def add(self, entry: QueueEntry) -> None:
        """A request was queued."""
        for depth in self._depths(entry):
            depth.requests += 1
            depth.tokens += tokens_of(entry)

    def remove(self, entry: QueueEntry) -> None:
        """It left the queue."""
        for depth in self._depths(entry):
            depth.requests -= 1
            depth.tokens -= tokens_of(entry)

    def note_dispatch(self, entry: QueueEntry, now_ms: int) -> None:
        """A request that has left the queue was granted."""
        for depth in self._depths(entry):
            pace = depth.pace
            if pace.last_ms:
                pace.average_milli = service.moved_average(pace.average_milli, max(0, now_ms - pace.last_ms))
            pace.last_ms = now_ms if depth.requests else 0

    def full(self, entry: QueueEntry, room: Room) -> QueueFull | None:
        """None if there is room for the request; else when there may be, at the pace that the queue drains with.

        Of several full queues the one that takes longest, the first of equals. A request larger than a whole token
        limit is admitted when nothing else of its queue waits."""
        limits = [("", room.queue_limit, room.token_limit)]
        limits += [(each.scope, each.requests, each.tokens) for each in entry.queues]
        worst: QueueFull | None = None
        for (scope, requests, tokens), depth in zip(limits, self._depths(entry), strict=True):
            wait_ms = _full_for_ms(depth, requests, tokens, tokens_of(entry))
            if wait_ms > (worst.retry_after_ms if worst else 0):
                worst = QueueFull(wait_ms, scope)
        return worst

    def _depths(self, entry: QueueEntry) -> list[Depth]:
        scopes = ("", *(each.scope for each in entry.queues))
        return [self._queues.setdefault((entry.tenant_id, scope), Depth()) for scope in scopes]

    def queues(self) -> Mapping[tuple[TenantId, str], list[int]]:
        """Requests, tokens, time of the last dispatch and average gap of each queue that has any of them."""
        found = {
            name: [depth.requests, depth.tokens, depth.pace.last_ms, depth.pace.average_milli]
            for name, depth in self._queues.items()
        }
        return {name: numbers for name, numbers in found.items() if any(numbers)}


def _full_for_ms(depth: Depth, request_limit: int, token_limit: int, size: int) -> int:
    count, places = depth.requests, 0
    if request_limit >= 0:
        places = max(0, count + 1 - request_limit)
    excess = depth.tokens + size - token_limit
    if token_limit and count and excess > 0:
        places = max(places, min(count, -(-excess * count // max(1, depth.tokens))))  # so many of average size must go
    return places * (depth.pace.average_milli // 1000 or RETRY_UNKNOWN_MS)


def tokens_of(entry: QueueEntry) -> int:
    """What a request may come to: its input and all the output that it allows."""
    return entry.input_tokens + entry.max_output_tokens

"""What each tenant has queued in a pool, in requests and in tokens, and how fast that drains: who is told "full"."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundhouse.vocabulary import TenantId
from services.scheduler.domain import service
from services.scheduler.domain.records import QueueEntry, Room

RETRY_UNKNOWN_MS = 1_000  # Retry-After of a full queue that has not drained yet; a guess


@dataclass(slots=True)
class Pace:
    """How fast a tenant's queue drains."""

    last_ms: int = 0  # of the last dispatch that left requests behind; 0 = none
    average_milli: int = 0  # ms between such dispatches, in thousandths


@dataclass(slots=True)
class Backlog:
    """Mutable; owned by one `FairQueue`."""

    requests: dict[TenantId, int] = field(default_factory=dict)
    tokens: dict[TenantId, int] = field(default_factory=dict)
    _paces: dict[TenantId, Pace] = field(default_factory=dict)

    def add(self, entry: QueueEntry) -> None:
        """A request was queued."""
        tenant_id = entry.tenant_id
        self.requests[tenant_id] = self.requests.get(tenant_id, 0) + 1
        self.tokens[tenant_id] = self.tokens.get(tenant_id, 0) + tokens_of(entry)

    def remove(self, entry: QueueEntry) -> None:
        """It left the queue."""
        self.requests[entry.tenant_id] -= 1
        self.tokens[entry.tenant_id] -= tokens_of(entry)

    def note_dispatch(self, tenant_id: TenantId, now_ms: int) -> None:
        """One of the tenant's requests was granted."""
        pace = self._paces.setdefault(tenant_id, Pace())
        if pace.last_ms:
            pace.average_milli = service.moved_average(pace.average_milli, max(0, now_ms - pace.last_ms))
        pace.last_ms = now_ms if self.requests.get(tenant_id) else 0

    def full_for_ms(self, entry: QueueEntry, room: Room) -> int:
        """0 if the tenant has room for the request; else when it may have, at the pace its own queue drains with.

        A request larger than the whole token limit is admitted when nothing else of its tenant waits."""
        count, tokens = self.requests.get(entry.tenant_id, 0), self.tokens.get(entry.tenant_id, 0)
        places = max(0, count + 1 - room.queue_limit)
        excess = tokens + tokens_of(entry) - room.token_limit
        if room.token_limit and count and excess > 0:
            places = max(places, min(count, -(-excess * count // max(1, tokens))))  # so many of average size must go
        if not places:
            return 0
        pace_ms = self._paces.get(entry.tenant_id, Pace()).average_milli // 1000
        return places * (pace_ms or RETRY_UNKNOWN_MS)

    def snapshot(self) -> Mapping[TenantId, tuple[int, int]]:
        """Requests and tokens of each tenant that has any."""
        return {name: (count, self.tokens[name]) for name, count in self.requests.items() if count}


def tokens_of(entry: QueueEntry) -> int:
    """What a request may come to: its input and all the output that it allows."""
    return entry.input_tokens + entry.max_output_tokens

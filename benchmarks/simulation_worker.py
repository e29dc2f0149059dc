"""One instance with slots on virtual time, fed by a list of arrivals, with an interchangeable queue discipline.

The fair discipline is the production `FairQueue`; FIFO and strict priority are what it is compared with. Times are
whole milliseconds. At one millisecond ends come before arrivals, and arrivals before grants. It loads no models.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.records import (
    Ending,
    Offer,
    Queued,
    QueueEntry,
    Room,
    Tokens,
    attempt_id,
    instance_key,
    version_key,
)
from services.scheduler.domain.service import Policy

VERSION = version_key("m", "sha256:1")
INSTANCE = instance_key(NodeId("n1"), VERSION)
NEVER_MS = 2**50
UNBOUNDED = 10**9


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `run_ms` is its time on the instance."""

    at_ms: int
    tenant: str
    run_ms: int
    input_tokens: int = 1
    output_tokens: int = 0
    output_tokens_max: int = 0
    weight_milli: int = 1000

    @property
    def units(self) -> int:
        """What it really costs."""
        return self.input_tokens + 2 * self.output_tokens


@dataclass(frozen=True, slots=True)
class Served:
    """When a request began and ended."""

    arrival: Arrival
    granted_ms: int
    ended_ms: int

    @property
    def wait_ms(self) -> int:
        """From arrival to grant."""
        return self.granted_ms - self.arrival.at_ms


class Discipline(Protocol):
    """Which request is next."""

    def arrive(self, number: int, arrival: Arrival, now_ms: int) -> None:
        """Queue a request."""
        ...

    def grant(self, now_ms: int) -> int | None:
        """Take the next request out; None if nobody waits or no slot is free."""
        ...

    def end(self, number: int, arrival: Arrival, now_ms: int) -> None:
        """A granted request ended; its slot is free."""
        ...


class Fifo:
    """First come, first served; a quiet tenant's requests before all others if `first` names it."""

    def __init__(self, slots: int = 1, first: Callable[[str], bool] = lambda _tenant: False) -> None:
        self._free = slots
        self._first = first
        self._queues: tuple[deque[int], deque[int]] = (deque(), deque())

    def arrive(self, number: int, arrival: Arrival, now_ms: int) -> None:
        """See `Discipline.arrive`."""
        self._queues[0 if self._first(arrival.tenant) else 1].append(number)

    def grant(self, now_ms: int) -> int | None:
        """See `Discipline.grant`."""
        queue = next((each for each in self._queues if each), None)
        if queue is None or not self._free:
            return None
        self._free -= 1
        return queue.popleft()

    def end(self, number: int, arrival: Arrival, now_ms: int) -> None:
        """See `Discipline.end`."""
        self._free += 1


class Fair:
    """The production queue. Raises RuntimeError if it refuses a request: room is unbounded here."""

    def __init__(self, policy: Policy, slots: int = 1) -> None:
        self.queue = FairQueue(policy)
        self._slots = slots
        self._offers = [Offer(INSTANCE, VERSION, slots)]

    def arrive(self, number: int, arrival: Arrival, now_ms: int) -> None:
        """See `Discipline.arrive`."""
        entry = QueueEntry(
            attempt_id(str(number), 1),
            TenantId(arrival.tenant),
            VERSION,
            PriorityClass.STANDARD,
            arrival.input_tokens,
            arrival.output_tokens_max,
            NEVER_MS,
            arrival.weight_milli,
        )
        answer = self.queue.enqueue(entry, Room(UNBOUNDED, self._slots), now_ms)
        if not isinstance(answer, Queued):
            raise RuntimeError(f"refused: {answer}")

    def grant(self, now_ms: int) -> int | None:
        """See `Discipline.grant`."""
        granted = self.queue.take(self._offers, 1, now_ms).granted
        return int(granted[0].attempt.partition("/")[0]) if granted else None

    def end(self, number: int, arrival: Arrival, now_ms: int) -> None:
        """See `Discipline.end`."""
        used = Tokens(arrival.input_tokens, 0, arrival.output_tokens)
        self.queue.finish(Ending(attempt_id(str(number), 1), Outcome.DONE, used, arrival.run_ms), now_ms)


def serve(arrivals: Sequence[Arrival], discipline: Discipline, until_ms: int = NEVER_MS) -> list[Served]:
    """Run until all are served or `until_ms`; in order of grant. `arrivals` are in order of time."""
    served: list[Served] = []
    ends: list[tuple[int, int]] = []
    position = 0
    while position < len(arrivals) or ends:
        coming_ms = arrivals[position].at_ms if position < len(arrivals) else NEVER_MS
        now_ms = min(coming_ms, ends[0][0] if ends else NEVER_MS)
        if now_ms >= until_ms:
            break
        while ends and ends[0][0] == now_ms:
            number = heapq.heappop(ends)[1]
            discipline.end(number, arrivals[number], now_ms)
        while position < len(arrivals) and arrivals[position].at_ms == now_ms:
            discipline.arrive(position, arrivals[position], now_ms)
            position += 1
        while (granted := discipline.grant(now_ms)) is not None:
            ended_ms = now_ms + arrivals[granted].run_ms
            served.append(Served(arrivals[granted], now_ms, ended_ms))
            heapq.heappush(ends, (ended_ms, granted))
    return served


def quantile(values: Sequence[int], part: float) -> int:
    """The value below which `part` of them lie (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0

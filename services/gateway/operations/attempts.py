"""Every attempt of this gateway that waits for a grant or runs: where grants are delivered and heartbeats come from.

Invariant 1: an attempt is in here from the moment it is submitted until it has ended, and ends once. A grant for an
attempt that is not here is not wanted. No I/O: the callers send what this makes.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from roundhouse.vocabulary import RequestId
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.domain.outcomes import refusal_error
from services.gateway.ports import Admitted, AttemptJournal

FINISHED_REPEAT_MS = 5_000  # contract: a finish is repeated in the heartbeats of the next 5 s


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to run a request. Token counts are those of what was received from the engine so far."""

    request_id: RequestId
    number: int
    pool: str
    submitted_ms: int  # monotonic
    reminded_ms: int  # monotonic: when the scheduler was last told of it
    answer: asyncio.Future[wire.Grant]
    admitted: Admitted
    position: int = 0
    estimated_wait_ms: int = 0
    cold: bool = False
    rejected: bool = False
    grant: wire.Grant | None = None
    opened_ms: int | None = None  # monotonic; when the engine stream was opened
    journal: AttemptJournal | None = None  # set with `opened_ms`
    node_id: str = ""  # where it runs now
    leaving: bool = False  # its node is being emptied
    prefill_node_id: str = ""  # where its prompt ran, if that was another node
    handed_over_ms: int | None = None  # monotonic; when decode was asked
    handoff_ms: int = 0  # from there to what came first of it; 0 = nothing came, or nothing was handed over
    first_token_ms: int | None = None  # from submit
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    counted_by_engine: bool = False
    ended: bool = False
    completed: bool = False  # everything was produced

    @property
    def counts(self) -> tuple[int, int, int]:
        """Input, cached and output tokens."""
        return self.input_tokens, self.cached_tokens, self.output_tokens


class Attempts:
    """The attempts of one gateway process. O(1) but for `heartbeat`, which is O(running)."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._open: dict[tuple[str, int], Attempt] = {}
        self._finished: deque[tuple[int, wire.Finished]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, attempt: Attempt) -> None:
        """From now on grants for it are wanted."""
        key = (attempt.request_id, attempt.number)
        assert key not in self._open, "an attempt is submitted once"
        self._open[key] = attempt

    def remove(self, attempt: Attempt) -> None:
        """From now on grants for it are not wanted. Idempotent."""
        self._open.pop((attempt.request_id, attempt.number), None)

    def deliver(self, delivery: wire.GrantDelivery) -> bool:
        """Give a grant or rejection to the attempt it is for; False = nobody waits. Idempotent."""
        answer = delivery.grant if delivery.WhichOneof("what") == "grant" else delivery.rejection
        attempt = self._open.get((answer.request_id, answer.attempt))
        if attempt is None:
            return False
        if isinstance(answer, wire.Grant):
            attempt.grant = answer  # a repetition carries the newest lease
            if not attempt.answer.done():
                attempt.answer.set_result(answer)
            return True
        attempt.rejected = True
        if not attempt.answer.done():
            attempt.answer.set_exception(refusal_error(answer.refused))
            attempt.answer.exception()  # an attempt that is just being cancelled may never look
        return True

    def remember(self, finished: wire.Finished, now_ms: int) -> None:
        """Repeat this finish in the heartbeats of the next `FINISHED_REPEAT_MS`."""
        self._finished.append((now_ms + FINISHED_REPEAT_MS, finished))

    def heartbeat(self, now_ms: int) -> wire.Heartbeat | None:
        """The message that renews all leases; None when there is nothing to say. `now_ms` is Unix time."""
        # Also what a clock that stepped back would have repeated until it has caught up.
        while self._finished and not now_ms <= self._finished[0][0] <= now_ms + FINISHED_REPEAT_MS:
            self._finished.popleft()
        leases = [_progress(attempt) for attempt in self._open.values() if attempt.grant is not None]
        if not leases and not self._finished:
            return None
        finished = [entry for _, entry in self._finished]
        return wire.Heartbeat(gateway_id=self._gateway_id, sent_unix_ms=now_ms, leases=leases, finished=finished)

    def held(self) -> list[Admitted]:
        """The admissions whose leases are to be renewed, waiting and running ones."""
        return [attempt.admitted for attempt in self._open.values()]

    def leave(self, node_id: str) -> None:
        """Have every stream on a node that can go on elsewhere do so with its next piece. Idempotent."""
        for attempt in self._open.values():
            if attempt.node_id == node_id:
                attempt.leaving = True


def _progress(attempt: Attempt) -> wire.LeaseProgress:
    assert attempt.grant is not None
    return wire.LeaseProgress(
        request_id=attempt.request_id,
        attempt=attempt.number,
        lease_id=attempt.grant.lease_id,
        pool=attempt.pool,
        input_tokens=attempt.input_tokens,
        cached_tokens=attempt.cached_tokens,
        output_tokens=attempt.output_tokens,
    )

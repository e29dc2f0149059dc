"""One admitted request: its attempts, its grant, its engine streams and what they produced.

Invariants 1 and 13: `finish` closes an attempt once, and the counts it reports are those of the chunks yielded here.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import structlog

from roundhouse.errors import EngineFailed, Unavailable
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.domain.budgets import Money
from services.gateway.domain.outcomes import ServedByOther, VersionUnknown, refusal_error
from services.gateway.operations.accounting import Work, ending_of, finished_message, started_event, usage_event
from services.gateway.operations.attempts import Attempt
from services.gateway.operations.call_progress import CallProgress, Counts, may_go_on
from services.gateway.operations.engine_streams import Produced, close_streams, next_or_none, produced_by, read_to_end
from services.gateway.operations.following import Following
from services.gateway.operations.handoff import HandingOver
from services.gateway.operations.shielding import finished_anyway
from services.gateway.operations.submission import SUBMIT_TRIES, cancel_message, pool_of, submit_request
from services.gateway.ports import (
    Admitted,
    EngineRequest,
    HeldBlocks,
    InferenceNode,
    NodeLeft,
    NodeLost,
    TensorReply,
)

if TYPE_CHECKING:
    from services.gateway.operations.run_request import RequestParts

log = structlog.get_logger(__name__)

# Pauses before the second and the third attempt, which are made only before the first token. A loader says within 2 s
# that its Triton was restarted; until then the scheduler may send a request there again.
RETRY_PAUSES_MS = (250, 1_500)
ATTEMPTS_MAX = 1 + len(RETRY_PAUSES_MS)
REMIND_MS = 10_000  # a guess: how much later a request starts that a failover of the store forgot
REMINDER_TIMEOUT_MS = 2_000  # nobody waits for it
COMMENT_INTERVAL_S = 2.0  # contract: a waiting stream hears something every 2 s or so


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing has come yet. `estimated_ms` is what is left of the scheduler's estimate; 0 = none."""

    stage: str  # queued, loading, running
    position: int
    estimated_ms: int


RunEvent = Waiting | Produced


class Run:
    """See the module. Made by `run_request`; `events` is iterated once."""

    def __init__(self, parts: "RequestParts", work: Work, admitted: Admitted, money: Sequence[Money] = ()) -> None:
        self.work = work
        self.admitted = admitted
        self.started_ms = parts.clock.monotonic_ms()
        self.used_tokens = 0
        self.costs = {each.scope: 0 for each in money}  # micro-units by scope
        self._money = money
        self._parts = parts
        self._attempt: Attempt | None = None
        self._progress = [CallProgress() for _ in work.calls]
        self._before = Counts()
        self._first_token_ms: int | None = None
        self._following = Following(parts.catalogue)
        self._events: AsyncGenerator[RunEvent, None] | None = None

    def events(self) -> AsyncIterator[RunEvent]:
        """`Waiting` now and then until the first chunk, then everything the engine produces.

        Raises what the scheduler's refusal means, EngineFailed, InvalidInput and Unavailable. A failure is tried again,
        through the scheduler, after a pause: from the beginning before the first chunk, afterwards from where it was,
        if the engine has named its tokens. The attempt is finished before the last piece comes."""
        assert self._events is None, "a run is iterated once"
        self._events = self._all_events()
        return self._events

    async def close_streams(self) -> None:
        """Cancel whatever still runs on nodes, wherever the iteration stands. Idempotent."""
        if self._events is not None:
            await self._events.aclose()

    async def _all_events(self) -> AsyncGenerator[RunEvent, None]:
        failures = 0
        for number in count(1):
            try:
                async with aclosing(self._attempt_events(number)) as events:
                    async for event in events:
                        yield event
                return
            except VersionUnknown as error:
                if not await self._moves_on(number, error):
                    raise
            except (EngineFailed, Unavailable) as error:
                failures += 1
                if failures == ATTEMPTS_MAX or not self._may_run_again(number):
                    raise
                log.warning("attempt_failed", request_id=self.work.request_id, attempt=number, error=error.code)
                await finished_anyway(self.finish(error))
                await self._parts.clock.sleep_ms(RETRY_PAUSES_MS[failures - 1])

    async def _moves_on(self, number: int, error: VersionUnknown) -> bool:
        """Whether the request goes on, perhaps as one for another version; only before its first token."""
        if self._before.output_tokens or self._following.is_over:
            return False
        if self._attempt is not None and self._attempt.number == number:
            await finished_anyway(self.finish(error))
        next_work = await self._following.next_work(self.work, self._parts.clock)
        self.work = next_work or self.work
        return next_work is not None

    def _may_run_again(self, number: int) -> bool:
        """Whether attempt `number` was given to an engine and another one can take its place unseen by the client.

        An attempt that the scheduler did not take leaves the one before it as the last: that one has ended."""
        attempt = self._attempt
        if attempt is None or attempt.number != number or attempt.grant is None:
            return False
        return attempt.first_token_ms is None or may_go_on(self._progress)

    async def _attempt_events(self, number: int) -> AsyncGenerator[RunEvent, None]:
        attempt = await finished_anyway(self._submit(number))
        self._parts.observer.queued(self.work.model.name, 1)
        try:
            async for waiting in self._until_done(attempt.answer, attempt):
                yield waiting
                await self._remind(attempt)
        finally:
            self._parts.observer.queued(self.work.model.name, -1)
        async with aclosing(self._stream(attempt, attempt.answer.result())) as events:
            async for event in events:
                yield event

    async def _submit(self, number: int) -> Attempt:
        """Submit; returns the accepted attempt, raises the refusal or ServedByOther."""
        attempt = Attempt(
            request_id=self.work.request_id,
            number=number,
            pool=pool_of(self.work),
            submitted_ms=(now_ms := self._parts.clock.monotonic_ms()),
            reminded_ms=now_ms,
            answer=asyncio.get_running_loop().create_future(),
            admitted=self.admitted,
        )
        self._parts.attempts.add(attempt)
        try:
            reply = await self._submitted(
                submit_request(self.work, attempt, self._parts.gateway_id, self.output_tokens)
            )
        except Unavailable:
            # It may be queued after all: take it out. A grant for it would be answered "not wanted".
            self._parts.attempts.remove(attempt)
            await self._quietly(self._parts.scheduler.cancel(cancel_message(attempt, self._parts.gateway_id)))
            raise
        except BaseException:  # it could not even be written
            self._parts.attempts.remove(attempt)
            raise
        if reply.WhichOneof("result") == "refused":
            self._parts.attempts.remove(attempt)
            raise refusal_error(reply.refused)
        if reply.WhichOneof("result") == "redirected":
            self._parts.attempts.remove(attempt)
            raise ServedByOther(reply.redirected.model, reply.redirected.reason)
        attempt.position = reply.accepted.position
        attempt.estimated_wait_ms = reply.accepted.estimated_wait_ms
        attempt.cold = reply.accepted.cold
        self._attempt = attempt
        return attempt

    async def _submitted(self, request: wire.SubmitRequest) -> wire.SubmitReply:
        for timeout_ms, to_all in SUBMIT_TRIES[:-1]:
            with suppress(Unavailable):
                return await self._parts.scheduler.submit(request, timeout_ms=timeout_ms, to_all=to_all)
        timeout_ms, to_all = SUBMIT_TRIES[-1]
        return await self._parts.scheduler.submit(request, timeout_ms=timeout_ms, to_all=to_all)

    async def _remind(self, attempt: Attempt) -> None:
        """Submit a waiting attempt again, now and then: idempotent while it is queued, and needed if the store that
        had the queue was replaced by one that had not heard of it yet. What is answered is not about the attempt."""
        now_ms = self._parts.clock.monotonic_ms()
        if now_ms - attempt.reminded_ms < REMIND_MS or attempt.answer.done():
            return
        attempt.reminded_ms = now_ms
        request = submit_request(self.work, attempt, self._parts.gateway_id, self.output_tokens)
        request.fallback_allowed = False
        await self._quietly(self._parts.scheduler.submit(request, timeout_ms=REMINDER_TIMEOUT_MS))

    async def _until_done(self, answer: "asyncio.Future[Any]", attempt: Attempt) -> AsyncIterator[Waiting]:
        """`Waiting` every `COMMENT_INTERVAL_S` until `answer` is done."""
        while not answer.done():
            await asyncio.wait((answer,), timeout=COMMENT_INTERVAL_S)
            if not answer.done():
                yield self._waiting(attempt)

    def _waiting(self, attempt: Attempt) -> Waiting:
        if attempt.grant is not None:
            return Waiting("running", 0, 0)
        left_ms = attempt.estimated_wait_ms - (self._parts.clock.monotonic_ms() - attempt.submitted_ms)
        return Waiting("loading" if attempt.cold else "queued", attempt.position, max(0, left_ms))

    async def _stream(self, attempt: Attempt, grant: wire.Grant) -> AsyncGenerator[RunEvent, None]:
        """Open the engine streams and yield what they produce."""
        attempt.opened_ms = self._parts.clock.monotonic_ms()
        attempt.input_tokens = 0 if self._before.input_tokens else self.work.input_tokens  # a prompt is billed once
        attempt.node_id = grant.placements[0].node_id
        self._begin_journal(attempt)
        pending = [index for index, each in enumerate(self._progress) if not each.ended]
        calls = [self._progress[index].resumed(self.work.calls[index]) for index in pending]
        timeout_ms = max(1, self.work.deadline_unix_ms - self._parts.clock.now_ms())
        produced = produced_by(self._node_of(attempt, grant), grant.placements[-1], calls, timeout_ms)
        first = asyncio.ensure_future(next_or_none(produced))
        exhausted = False
        try:
            async for waiting in self._until_done(first, attempt):
                yield waiting
            item = first.result()
            left = len(calls)
            self._note_first_token(attempt)
            while item is not None:
                item.index = pending[item.index]
                item.seen_before = item.seen_before or self._progress[item.index].heard
                left -= self._count(attempt, item)
                self._note(attempt)  # before it is handed on: a kill after this loses nothing
                if left == 0:
                    # Before the last piece is handed on: a client that leaves after reading it has had everything.
                    await finished_anyway(self.finish(None))
                yield item
                if attempt.leaving and left and may_go_on(self._progress):
                    raise NodeLeft("The node that ran the request is being emptied.")
                if not left:
                    exhausted = await read_to_end(produced)
                    return
                item = await anext(produced, None)
            exhausted = True
            raise EngineFailed("The engine ended without finishing the request.")
        finally:
            if not exhausted:
                await finished_anyway(close_streams(first, produced))

    def _node_of(self, attempt: Attempt, grant: wire.Grant) -> InferenceNode:
        """The nodes; of a grant for two, as one."""
        if len(grant.placements) < 2:
            return self._parts.node
        first, then = grant.placements[0], grant.placements[-1]
        call = next((call for call in self.work.calls if isinstance(call, EngineRequest)), None)
        salt, prompt = (call.salt, tuple(call.prompt_token_ids)) if call is not None else ("", ())
        handle = f"{attempt.request_id}/{attempt.number}"
        held = HeldBlocks(bytes.fromhex(salt), self.work.block_keys, handle, self.work.shared, prompt)

        def handed_over() -> None:
            attempt.prefill_node_id, attempt.node_id = first.node_id, then.node_id
            attempt.handed_over_ms = self._parts.clock.monotonic_ms()

        def resumed() -> None:
            if attempt.handed_over_ms is not None:
                attempt.handoff_ms = max(1, self._parts.clock.monotonic_ms() - attempt.handed_over_ms)

        return HandingOver(self._parts.node, self._parts.holds, first, held, handed_over, resumed)

    def _note_first_token(self, attempt: Attempt) -> None:
        attempt.first_token_ms = self._parts.clock.monotonic_ms() - attempt.submitted_ms
        if self._first_token_ms is None:
            self._first_token_ms = attempt.first_token_ms

    def _begin_journal(self, attempt: Attempt) -> None:
        clock = self._parts.clock
        started = started_event(self.work, attempt, self._parts.cluster, clock.now_ms(), clock.monotonic_ms())
        attempt.journal = self._parts.usage.begin(started, attempt.pool)
        self._note(attempt)

    def _note(self, attempt: Attempt) -> None:
        assert attempt.journal is not None
        attempt.journal.note(*attempt.counts)

    def _count(self, attempt: Attempt, item: Produced) -> bool:
        """Add a piece to the books; True if it is the last one of its call."""
        self._progress[item.index].took(item.piece)
        if isinstance(item.piece, TensorReply):
            attempt.finish_reason = "stop"
            return True
        chunk = item.piece
        attempt.output_tokens += chunk.output_tokens
        attempt.counted_by_engine = attempt.counted_by_engine or chunk.output_tokens > 0
        if (
            item.index % self.work.choices == 0 and not self._before.input_tokens
        ):  # a prompt is billed once, however many choices it has
            if chunk.input_tokens is not None and not item.seen_before:
                call = cast("EngineRequest", self.work.calls[item.index])
                attempt.input_tokens += chunk.input_tokens - len(call.prompt_token_ids)
            if chunk.cached_tokens and not item.seen_before:
                attempt.cached_tokens += chunk.cached_tokens
        if chunk.finish_reason is None:
            return False
        attempt.finish_reason = chunk.finish_reason
        return True

    async def finish(self, error: BaseException | None) -> None:
        """Close the open attempt: usage event, then the slot. Idempotent. Not to be cancelled midway."""
        attempt = self._attempt
        if attempt is None or attempt.ended:
            return
        attempt.ended = True
        attempt.completed = error is None
        self._parts.attempts.remove(attempt)
        ending = ending_of(attempt, error, self._parts.clock.monotonic_ms())
        self.used_tokens += attempt.input_tokens + attempt.output_tokens
        for each in self._money:
            self.costs[each.scope] += each.tariff.cost_micro(*attempt.counts)
        self._before = self._before.plus(attempt)
        now_ms = self._parts.clock.now_ms()
        if isinstance(error, NodeLost):  # before the slot is free: the next attempt must not be sent there again
            await self._quietly(self._parts.scheduler.lost(attempt.node_id))
        await self._parts.usage.record(usage_event(self.work, ending, self._parts.cluster, now_ms))
        if attempt.grant is not None:
            finished = finished_message(ending)
            self._parts.attempts.remember(finished, now_ms)
            await self._quietly(self._parts.scheduler.finished(finished))
        elif not attempt.rejected:
            await self._quietly(self._parts.scheduler.cancel(cancel_message(attempt, self._parts.gateway_id)))

    async def _quietly(self, write: Coroutine[Any, Any, object]) -> None:
        try:
            await write
        except Unavailable as error:
            # Heartbeats repeat a finish; a cancelled request that is granted later is answered "not wanted".
            log.warning("scheduler_not_told", request_id=self.work.request_id, error=error.message)

    @property
    def was_accepted(self) -> bool:
        """Whether the scheduler took it at least once; a request that was refused must leave no trace in limits."""
        return self._attempt is not None

    @property
    def is_open(self) -> bool:
        """Whether an accepted attempt has not ended yet."""
        return self._attempt is not None and not self._attempt.ended

    @property
    def is_done(self) -> bool:
        """Whether everything was produced."""
        return self._attempt is not None and self._attempt.completed

    @property
    def waits_for_load(self) -> bool:
        """Whether the request waits for a model that no node has ready."""
        return self._attempt is not None and self._attempt.cold and self._attempt.grant is None

    @property
    def _sum(self) -> Counts:
        """Over all attempts; an ended one is in `_before`."""
        attempt = self._attempt
        return self._before if attempt is None or attempt.ended else self._before.plus(attempt)

    @property
    def input_tokens(self) -> int:
        """Prompt tokens."""
        return self._sum.input_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache."""
        return self._sum.cached_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return self._sum.output_tokens

    @property
    def first_token_ms(self) -> int | None:
        """From submit to the first chunk; None before it."""
        return self._first_token_ms

    @property
    def grant(self) -> wire.Grant | None:
        """The grant of the last attempt."""
        return self._attempt.grant if self._attempt else None

    @property
    def finish_reason(self) -> str:
        """Of the last call that ended; empty before."""
        return self._attempt.finish_reason if self._attempt else ""

    @property
    def queue_ms(self) -> int:
        """Wait in the queue, without staging and loading."""
        return self.grant.queue_ms if self.grant else 0

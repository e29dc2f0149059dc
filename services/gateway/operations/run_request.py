"""The life of a request on the gateway's side: admit, submit, wait for the grant, stream, settle.

The OpenAI, KServe REST and KServe gRPC edges share this. Whatever ends a request (its last token, a refusal, the
client leaving, its deadline, an engine's death) passes through one place: each accepted attempt is finished once and
has one usage event, and the admission is settled once (invariants 1 and 13). What follows the admission is shielded
from cancellation and bounded. A lost scheduler, bus or store delays those writes, but never ends a stream that runs
(invariant 18). Nothing here knows HTTP.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from opentelemetry.trace import Status, StatusCode

from roundhouse import telemetry
from roundhouse.catalogue.store import CatalogueView
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, DeadlinePassed, RoundhouseError, Unavailable
from roundhouse.vocabulary import Outcome
from services.gateway.domain.outcomes import outcome_of
from services.gateway.operations.accounting import Work
from services.gateway.operations.attempts import Attempts
from services.gateway.operations.money import money_for
from services.gateway.operations.run import Run
from services.gateway.operations.scoped_limits import scoped_limits
from services.gateway.operations.settlements import Settlements
from services.gateway.operations.shielding import finished_anyway
from services.gateway.ports import (
    Admission,
    BlockHolds,
    InferenceNode,
    RequestEnded,
    RequestObserver,
    SchedulerGateway,
    UsageSink,
)

OUTBOX_FULL_RETRY_MS = 2_000  # a guess: how soon JetStream may be back
LOAD_HELD_RETRY_MS = 5_000  # a guess: when to ask again for a model whose load outlasted the deadline


@dataclass(frozen=True, slots=True)
class RequestParts:
    """What running a request needs. Fakes take these places in tests."""

    cluster: str
    gateway_id: str
    admission: Admission
    scheduler: SchedulerGateway
    node: InferenceNode
    usage: UsageSink
    attempts: Attempts
    settlements: Settlements
    holds: BlockHolds
    observer: RequestObserver
    clock: Clock
    catalogue: CatalogueView | None = None  # of the versions that requests use now; None = a request keeps its own


@asynccontextmanager
async def run_request(parts: RequestParts, work: Work) -> AsyncIterator[Run]:
    """Admit a request and keep it accounted for until the context is left.

    Entering raises what `Admission.admit` raises, and Unavailable while usage events have no place to go; then nothing
    was spent. Inside, iterate `Run.events()`. The deadline ends the body with DeadlinePassed. An exception of the body,
    cancellation included, decides the outcome of an attempt that is still open; leaving settles, even if cancelled."""
    if not parts.usage.has_room:
        reason = f"Usage cannot be recorded now: {parts.usage.full_reason}"
        raise Unavailable(reason, retry_after_ms=OUTBOX_FULL_RETRY_MS)
    admitted = await parts.admission.admit(
        work.caller,
        work.request_id,
        work.tenant.limits,
        input_tokens=work.input_tokens,
        reserve_tokens=work.input_tokens + work.max_output_tokens,
        also=scoped_limits(work),
        money=(money := money_for(work, parts.clock.now_ms())),
    )
    run = Run(parts, work, admitted, money)
    parts.observer.started(work.operation, work.model.name)
    error: BaseException | None = None
    with telemetry.inner_span(f"{work.operation} {work.name}") as span:
        try:
            async with _deadline(parts, run):
                yield run
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await finished_anyway(_leave(parts, run, error))
            finally:  # whoever has the whole answer may hang up while it is being settled
                if span.is_recording():
                    span.set_attributes(_span_attributes(run, error))
                if error is not None and not run.is_done:
                    span.set_status(Status(StatusCode.ERROR))


@asynccontextmanager
async def _deadline(parts: RequestParts, run: Run) -> AsyncIterator[None]:
    remaining_s = (run.work.deadline_unix_ms - parts.clock.now_ms()) / 1000
    try:
        async with asyncio.timeout(remaining_s) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise _deadline_error(run) from error


def _deadline_error(run: Run) -> RoundhouseError:
    if run.work.operation == "infer" and run.waits_for_load:
        # Case B04 (c): a tensor client should come again, since the load goes on without it.
        return CapacityExhausted("The model is still being loaded.", retry_after_ms=LOAD_HELD_RETRY_MS)
    return DeadlinePassed("The deadline of the request passed.")


def _span_attributes(run: Run, error: BaseException | None) -> dict[str, str | int | tuple[str, ...]]:
    """OpenTelemetry GenAI attributes of the request's span."""
    attributes: dict[str, str | int | tuple[str, ...]] = {
        "gen_ai.operation.name": run.work.operation,
        "gen_ai.provider.name": "roundhouse",
        "gen_ai.request.model": run.work.name,
        "gen_ai.usage.input_tokens": run.input_tokens,
        "gen_ai.usage.output_tokens": run.output_tokens,
    }
    if run.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (run.finish_reason,)
    if error is not None and not run.is_done:
        code = error.code if isinstance(error, RoundhouseError) else None
        attributes["error.type"] = code or type(error).__name__
    return attributes


async def _leave(parts: RequestParts, run: Run, error: BaseException | None) -> None:
    """Close an attempt that is still open, settle the admission, tell the observer."""
    if error is None and run.is_open:
        error = asyncio.CancelledError()  # the body left early of its own accord
    try:
        await run.close_streams()
    finally:  # whatever is wrong with a stream: heartbeats would hold the slot of an attempt that is not finished
        await run.finish(error)
        await _settle(parts, run)
    outcome = Outcome.DONE if run.is_done else outcome_of(error)
    parts.observer.ended(
        RequestEnded(
            operation=run.work.operation,
            model=run.work.model.name,
            outcome=outcome,
            error_type=type(error).__name__ if error is not None and outcome is not Outcome.DONE else "",
            total_ms=parts.clock.monotonic_ms() - run.started_ms,
            first_token_ms=run.first_token_ms,
            queue_ms=run.queue_ms,
            output_tokens=run.output_tokens,
        )
    )


async def _settle(parts: RequestParts, run: Run) -> None:
    if run.was_accepted:
        await parts.settlements.settle(run.admitted, used_tokens=run.used_tokens, costs=run.costs)
    else:
        await parts.settlements.withdraw(run.admitted)

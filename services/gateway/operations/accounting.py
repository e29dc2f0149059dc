"""What an ended attempt says of itself: the finish for the scheduler and the usage event for metering.

Both carry the same token counts, which are those of what was streamed (invariant 13). An attempt that failed before
its first token costs nothing; one that was cancelled or expired costs its prompt and what was generated until then,
once an engine had it.
"""

from dataclasses import dataclass

from roundhouse.block_keys import OWN_SPACE_ONLY, SharedBeginning
from roundhouse.catalogue.records import Adapter, Model, Tenant
from roundhouse.vocabulary import Outcome, RequestId
from roundhouse.wire.v1 import scheduling_pb2, usage_pb2
from services.gateway.domain.outcomes import outcome_of, status_of
from services.gateway.operations.attempts import Attempt
from services.gateway.ports import Caller, EngineRequest, InstanceBroken, TensorRequest

EVENT_TYPE = "roundhouse.usage.v1"
ABANDONED_STATUS = 502  # what the client of a gateway that vanished saw, if anything; as the scheduler says


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A checked request, ready to be admitted. `calls` are prompt-major: choice c of prompt p is at p·choices + c."""

    request_id: RequestId
    operation: str  # chat, completion, embedding, infer
    caller: Caller
    tenant: Tenant
    model: Model
    adapter: Adapter | None
    input_tokens: int
    max_output_tokens: int  # of all calls together
    deadline_unix_ms: int
    calls: tuple[EngineRequest | TensorRequest, ...]
    choices: int = 1
    block_keys: tuple[bytes, ...] = ()
    shared: SharedBeginning = OWN_SPACE_ONLY  # which of them are a sharing group's
    fallback_allowed: bool = False  # the scheduler may answer with `ServedByOther`

    @property
    def name(self) -> str:
        """What the tenant called: the adapter's name if there is one."""
        return self.adapter.name if self.adapter is not None else self.model.name


@dataclass(frozen=True, slots=True)
class Ending:
    """An attempt that has just ended, and how long it took on the instance and in all."""

    attempt: Attempt
    outcome: Outcome
    status: int
    run_ms: int
    total_ms: int
    instance_broken: bool = False


def ending_of(attempt: Attempt, error: BaseException | None, monotonic_ms: int) -> Ending:
    """Close the books of an attempt: what is not to be billed is taken out of its counts."""
    outcome = outcome_of(error)
    if attempt.opened_ms is None or (outcome is Outcome.FAILED and attempt.output_tokens == 0):
        attempt.input_tokens = attempt.cached_tokens = attempt.output_tokens = 0
    run_ms = monotonic_ms - attempt.opened_ms if attempt.opened_ms is not None else 0
    total_ms = monotonic_ms - attempt.submitted_ms
    return Ending(attempt, outcome, status_of(error), run_ms, total_ms, isinstance(error, InstanceBroken))


def finished_message(ending: Ending) -> scheduling_pb2.Finished:
    """The finish of an attempt that had a grant."""
    attempt = ending.attempt
    assert attempt.grant is not None
    return scheduling_pb2.Finished(
        request_id=attempt.request_id,
        attempt=attempt.number,
        lease_id=attempt.grant.lease_id,
        pool=attempt.pool,
        outcome=ending.outcome.to_wire(),
        input_tokens=attempt.input_tokens,
        cached_tokens=attempt.cached_tokens,
        output_tokens=attempt.output_tokens,
        run_ms=ending.run_ms,
        instance_broken=ending.instance_broken,
        node_id=attempt.node_id,
        first_token_node_id=attempt.prefill_node_id,
        first_token_ms=_engine_first_token_ms(attempt),
        handoff_ms=attempt.handoff_ms,
    )


def _engine_first_token_ms(attempt: Attempt) -> int:
    """From the start of the stream; what the scheduler learns an instance's speed from. 0 = nothing came."""
    if attempt.first_token_ms is None or attempt.opened_ms is None:
        return 0
    return max(1, attempt.submitted_ms + attempt.first_token_ms - attempt.opened_ms)


def usage_event(work: Work, ending: Ending, cluster: str, now_ms: int) -> usage_pb2.UsageEvent:
    """The one usage event of an attempt. `now_ms` is Unix time."""
    attempt = ending.attempt
    grant = attempt.grant or scheduling_pb2.Grant()
    by_engine = attempt.counted_by_engine
    data = usage_pb2.UsageData(
        request_id=attempt.request_id,
        attempt=attempt.number,
        key_id=work.caller.key_id,
        model=work.model.name,
        model_digest=work.model.digest,
        adapter=work.adapter.name if work.adapter else "",
        adapter_digest=work.adapter.digest if work.adapter else "",
        priority_class=work.tenant.priority_class.to_wire(),
        outcome=ending.outcome.to_wire(),
        status=ending.status,
        finish_reason=attempt.finish_reason,
        input_tokens=attempt.input_tokens,
        cached_tokens=attempt.cached_tokens,
        output_tokens=attempt.output_tokens,
        counted_by=usage_pb2.TOKEN_SOURCE_ENGINE if by_engine else usage_pb2.TOKEN_SOURCE_GATEWAY,
        queue_ms=grant.queue_ms if attempt.grant is not None else ending.total_ms,
        stage_ms=grant.stage_ms,
        load_ms=grant.load_ms,
        first_token_ms=attempt.first_token_ms or 0,
        total_ms=ending.total_ms,
        run_ms=ending.run_ms,
        node_id=attempt.node_id,
        operation=work.operation,
        emitter="gateway",
    )
    return usage_pb2.UsageEvent(
        id=f"{attempt.request_id}/{attempt.number}",
        source=cluster,
        type=EVENT_TYPE,
        subject=work.caller.tenant_id,
        time_unix_ms=now_ms,
        data=data,
    )


def started_event(work: Work, attempt: Attempt, cluster: str, now_ms: int, monotonic_ms: int) -> usage_pb2.UsageEvent:
    """The event of an attempt as if its gateway died now: what `abandoned_event` completes. `now_ms` is Unix time."""
    waited_ms = monotonic_ms - attempt.submitted_ms
    return usage_event(work, Ending(attempt, Outcome.ABANDONED, ABANDONED_STATUS, 0, waited_ms), cluster, now_ms)


def abandoned_event(
    started: usage_pb2.UsageEvent, input_tokens: int, cached_tokens: int, output_tokens: int, *, ended_ms: int
) -> usage_pb2.UsageEvent:
    """The event of an attempt whose gateway was killed at `ended_ms` (Unix time), with the counts it had reached.

    Nobody got anything of an attempt without a token, so that one costs nothing, as one that failed."""
    event = usage_pb2.UsageEvent()
    event.CopyFrom(started)
    ran_ms = max(0, ended_ms - started.time_unix_ms)
    event.data.input_tokens = input_tokens if output_tokens else 0
    event.data.cached_tokens = cached_tokens if output_tokens else 0
    event.data.output_tokens = output_tokens
    event.data.counted_by = usage_pb2.TOKEN_SOURCE_GATEWAY
    event.data.run_ms = ran_ms
    event.data.total_ms = started.data.total_ms + ran_ms
    event.time_unix_ms = started.time_unix_ms + ran_ms
    return event


def abandoned_finish(event: usage_pb2.UsageEvent, pool: str) -> scheduling_pb2.Finished:
    """The finish of an attempt that its killed gateway can no longer report: its slot is free at once."""
    data = event.data
    return scheduling_pb2.Finished(
        request_id=data.request_id,
        attempt=data.attempt,
        lease_id=event.id,
        pool=pool,
        outcome=data.outcome,
        input_tokens=data.input_tokens,
        cached_tokens=data.cached_tokens,
        output_tokens=data.output_tokens,
        run_ms=data.run_ms,
        node_id=data.node_id,
    )

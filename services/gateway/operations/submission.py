"""What the scheduler is told of a request. No I/O."""

from typing import Final, NamedTuple

from roundhouse.vocabulary import PoolName
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.accounting import Work
from services.gateway.operations.attempts import Attempt
from services.gateway.operations.scoped_limits import queue_limits


class SubmitTry(NamedTuple):
    """How long one try waits for an answer, and whether every replica is asked or one by chance."""

    timeout_ms: int
    to_all: bool = False


SUBMIT_TRIES: Final = (SubmitTry(400), SubmitTry(600), SubmitTry(2_000, to_all=True), SubmitTry(2_000, to_all=True))
"""Submitting is idempotent, and the first answer counts.

A frozen replica takes its share of what goes to one by chance until the bus drops it, which takes two seconds; asked
all together, any other answers: a request loses a second to it at most. Asking all from the start would cost each
replica every request. The first wait is a guess: a thousand times what an idle scheduler takes."""


def pool_of(work: Work) -> PoolName:
    """Where the request is placed: the tenant's own nodes if it is isolated, else the model's pool."""
    return work.tenant.pool_of(work.model)


def submit_request(work: Work, attempt: Attempt, gateway_id: str, generated: int) -> wire.SubmitRequest:
    return wire.SubmitRequest(
        request_id=work.request_id,
        attempt=attempt.number,
        gateway_id=gateway_id,
        tenant_id=work.caller.tenant_id,
        key_id=work.caller.key_id,
        model=work.model.name,
        model_digest=work.model.digest,
        adapter=work.adapter.name if work.adapter else "",
        adapter_digest=work.adapter.digest if work.adapter else "",
        priority_class=work.tenant.priority_class.to_wire(),
        input_tokens=work.input_tokens,
        max_output_tokens=work.max_output_tokens - generated,
        deadline_unix_ms=work.deadline_unix_ms,
        block_keys=work.block_keys,
        pool=attempt.pool,
        fallback_allowed=work.fallback_allowed and attempt.number == 1,
        queue_limits=queue_limits(work),
    )


def cancel_message(attempt: Attempt, gateway_id: str) -> wire.Cancel:
    return wire.Cancel(request_id=attempt.request_id, attempt=attempt.number, gateway_id=gateway_id, pool=attempt.pool)

"""What the scheduler is told of a request. No I/O."""

from roundhouse.vocabulary import PoolName
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.accounting import Work
from services.gateway.operations.attempts import Attempt
from services.gateway.operations.scoped_limits import queue_limits

SUBMIT_WAITS_MS = (400, 600, 800, 1_000, 2_000)
"""How long each try waits for an answer. Submitting is idempotent; every try reaches a replica by chance.

Of two replicas one of which is frozen, a submit reaches the other within 2 s in seven of eight cases; after 3 s, when
the bus has dropped the frozen one, always. The first wait is a guess: a thousand times what an idle scheduler takes."""


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

"""The limits of a request beside its tenant's: those of its key and those of the model for this tenant.

All are checked and taken together (`Admission.admit`; the queue's by the scheduler, which has the queue in its hands);
each tenant, key and model has meters of its own.
"""

from collections.abc import Iterator

from roundhouse.budgets import key_scope, model_scope
from roundhouse.catalogue.records import ScopeLimits
from roundhouse.wire.v1.scheduling_pb2 import QueueLimit
from services.gateway.domain.limits import ScopedLimits
from services.gateway.operations.accounting import Work


def scoped_limits(work: Work) -> tuple[ScopedLimits, ...]:
    """What else the request must fit. A model's limits go by the name that was called, an adapter's own included."""
    found = [_scoped(scope, limits) for scope, limits in _scopes(work)]
    return tuple(one for one in found if not one.limits_nothing)


def queue_limits(work: Work) -> list[QueueLimit]:
    """How many of the requests of its key, and of its tenant on its model, may wait for a slot."""
    return [
        QueueLimit(
            scope=scope,
            requests=-1 if limits.queued_requests is None else limits.queued_requests,
            tokens=limits.queued_tokens or 0,
        )
        for scope, limits in _scopes(work)
        if limits.queued_requests is not None or limits.queued_tokens is not None
    ]


def model_limits(work: Work) -> ScopeLimits | None:
    """What the tenant may do with the name that was called, if that is limited."""
    return work.tenant.model_limits(work.name) or work.model.tenant_limits


def _scopes(work: Work) -> Iterator[tuple[str, ScopeLimits]]:
    if work.caller.limits is not None:
        yield key_scope(work.caller.key_id), work.caller.limits
    of_model = model_limits(work)
    if of_model is not None:
        yield model_scope(work.name), of_model


def _scoped(scope: str, limits: ScopeLimits) -> ScopedLimits:
    return ScopedLimits(scope, limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)

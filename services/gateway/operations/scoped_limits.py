"""The limits of a request beside its tenant's: those of its key and those of the model for this tenant.

All are checked and taken together, in one step (`Admission.admit`); each tenant, key and model has meters of its own.
"""

from roundhouse.catalogue.records import Limits
from services.gateway.domain.limits import ScopedLimits
from services.gateway.operations.accounting import Work


def scoped_limits(work: Work) -> tuple[ScopedLimits, ...]:
    """What else the request must fit. A model's limits go by the name that was called, an adapter's own included."""
    found = []
    if work.caller.limits is not None:
        found.append(_scoped(f"k:{work.caller.key_id}", work.caller.limits))
    of_model = work.tenant.model_limits(work.name) or work.model.tenant_limits
    if of_model is not None:
        found.append(_scoped(f"m:{work.name}", of_model))
    return tuple(one for one in found if not one.limits_nothing)


def _scoped(scope: str, limits: Limits) -> ScopedLimits:
    return ScopedLimits(scope, limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)

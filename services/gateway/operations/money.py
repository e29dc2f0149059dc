"""What a request asks of budgets: of its tenant's, of its key's, and of the model's for this tenant."""

from collections.abc import Iterator

from roundhouse.budgets import key_scope, model_scope
from roundhouse.catalogue.records import Budget
from services.gateway.domain.budgets import Money, money_of, tariff_of
from services.gateway.operations.accounting import Work
from services.gateway.operations.scoped_limits import model_limits


def money_for(work: Work, now_ms: int) -> tuple[Money, ...]:
    """The most that the request may cost, for each budget that it counts against. `now_ms` is Unix time."""
    return tuple(_money(work, scope, budget, now_ms) for scope, budget in _budgets(work))


def _budgets(work: Work) -> Iterator[tuple[str, Budget]]:
    if work.tenant.budget is not None:
        yield "", work.tenant.budget
    caller = work.caller
    if caller.limits is not None and caller.limits.budget is not None:
        yield key_scope(caller.family or caller.key_id), caller.limits.budget
    of_model = model_limits(work)
    if of_model is not None and of_model.budget is not None:
        yield model_scope(work.name), of_model.budget


def _money(work: Work, scope: str, budget: Budget, now_ms: int) -> Money:
    tariff = tariff_of(work.model, work.adapter, work.tenant.priority_class, budget.currency)
    return money_of(
        budget,
        tariff,
        input_tokens=work.input_tokens,
        max_output_tokens=work.max_output_tokens,
        now_ms=now_ms,
        scope=scope,
    )

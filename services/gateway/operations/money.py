"""What a request asks of its tenant's budget, if the tenant has one."""

from services.gateway.domain.budgets import Money, money_of, tariff_of
from services.gateway.operations.accounting import Work


def money_for(work: Work, now_ms: int) -> Money | None:
    """The most that the request may cost, and its tariff. None without a budget. `now_ms` is Unix time."""
    budget = work.tenant.budget
    if budget is None:
        return None
    tariff = tariff_of(work.model, work.adapter, work.tenant.priority_class, budget.currency)
    return money_of(
        budget,
        tariff,
        input_tokens=work.input_tokens,
        max_output_tokens=work.max_output_tokens,
        now_ms=now_ms,
    )

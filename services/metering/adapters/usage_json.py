"""How ledger answers look in JSON. The shapes are a contract with callers: docs/tenants/billing.md."""

from typing import Any

from services.metering.domain.ledger import LedgerRow
from services.metering.domain.periods import day_text, hour_text, instant_text
from services.metering.domain.queries import Dimension, GroupValue, Reconciliation, Totals, UsageGroup
from services.metering.domain.rating import money_text


def group_json(group: UsageGroup, by: tuple[Dimension, ...]) -> dict[str, Any]:
    """One group: its dimensions by name, then its sums."""
    named = {dimension.value: _value(dimension, value) for dimension, value in zip(by, group.key[:-1], strict=True)}
    return named | totals_json(group.totals)


def totals_json(totals: Totals) -> dict[str, Any]:
    """Sums of one currency."""
    return {
        "requests": totals.requests,
        "attempts": totals.attempts,
        "input_tokens": totals.input_tokens,
        "cached_tokens": totals.cached_tokens,
        "output_tokens": totals.output_tokens,
        "amount": money_text(totals.amount),
        "currency": totals.currency,
    }


def request_json(row: LedgerRow) -> dict[str, Any]:
    """Everything that is known of one attempt."""
    facts = row.facts
    return {
        "sequence": row.sequence,
        "request_id": facts.request_id,
        "attempt": facts.attempt,
        "event_id": facts.event_id,
        "source": facts.source,
        "time": instant_text(facts.time_ms),
        "tenant": facts.tenant_id,
        "key": facts.key_id,
        "model": facts.model,
        "model_digest": facts.model_digest,
        "adapter": facts.adapter,
        "adapter_digest": facts.adapter_digest,
        "class": facts.priority_class.value,
        "operation": facts.operation,
        "outcome": facts.outcome.value,
        "status": facts.status,
        "finish_reason": facts.finish_reason,
        "input_tokens": facts.input_tokens,
        "cached_tokens": facts.cached_tokens,
        "output_tokens": facts.output_tokens,
        "counted_by": facts.counted_by,
        "queue_ms": facts.queue_ms,
        "stage_ms": facts.stage_ms,
        "load_ms": facts.load_ms,
        "first_token_ms": facts.first_token_ms,
        "run_ms": facts.run_ms,
        "total_ms": facts.total_ms,
        "node": facts.node_id,
        "emitter": facts.emitter,
        "price_id": row.rating.price_id,
        "amount": money_text(row.rating.amount),
        "currency": row.rating.currency,
        "recorded": instant_text(row.recorded_ms),
        "corrects_sequence": row.corrects_sequence,
    }


def reconciliation_json(found: Reconciliation) -> dict[str, Any]:
    """Totals by currency, and where ledger and billing stream stand."""
    return {
        "totals": [totals_json(totals) for totals in found.totals],
        "outcomes": dict(found.outcomes),
        "corrections": found.corrections,
        "quarantined": found.quarantined,
        "sequence": found.sequence,
        "published_sequence": found.published_sequence,
    }


def _value(dimension: Dimension, value: GroupValue) -> GroupValue:
    if dimension is Dimension.DAY:
        return day_text(int(value))
    return hour_text(int(value)) if dimension is Dimension.HOUR else value

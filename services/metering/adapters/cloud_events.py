"""Usage events and rated records as CloudEvents 1.0 in JSON, for whoever speaks no protobuf.

`data` keeps apart what was asked for, what was measured, and what was made of it: `request`, `measured`, `rating`.
Nothing allocated is in an event: shares of a node's cost are a report (`costs`). The shapes are published as JSON
schemas in docs/schemas; within version 1 keys are only added. Source: CloudEvents 1.0.2, JSON event format.
"""

from typing import Any, Final

from roundhouse.vocabulary import Outcome, PriorityClass
from services.metering.adapters.usage_wire import idempotency_key
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.periods import instant_text, month_text, parse_instant
from services.metering.domain.rating import money_text
from services.metering.domain.usage import EVENT_TYPE, UsageFacts

SPEC_VERSION: Final = "1.0"
RATED_TYPE: Final = "roundhouse.rated.v1"
USAGE_SCHEMA: Final = "urn:roundhouse:schema:usage-event:v1"
RATED_SCHEMA: Final = "urn:roundhouse:schema:rated-record:v1"
_REQUEST: Final = (
    *("request_id", "attempt", "key_id", "model", "model_digest", "adapter", "adapter_digest"),
    *("status", "finish_reason", "operation", "emitter"),
)
_MEASURED: Final = (
    *("input_tokens", "cached_tokens", "output_tokens", "counted_by"),
    *("queue_ms", "stage_ms", "load_ms", "first_token_ms", "total_ms", "run_ms", "node_id"),
)


def usage_event_json(facts: UsageFacts) -> dict[str, Any]:
    """One usage event. The id is the same whoever emits it and however often."""
    return _envelope(facts, facts.event_id, EVENT_TYPE, USAGE_SCHEMA) | {"data": _data(facts)}


def rated_record_json(row: LedgerRow) -> dict[str, Any]:
    """One ledger row as it is billed. `id` is the idempotency key: the same row is always the same event."""
    rating: dict[str, Any] = {
        "sequence": row.sequence,
        "kind": row.kind,
        "period": month_text(row.period_ms),
        "price_id": row.rating.price_id,
        "amount": money_text(row.rating.amount),
        "currency": row.rating.currency,
        "recorded": instant_text(row.recorded_ms),
        "usage_event_id": row.facts.event_id,
    }
    if row.corrects_sequence is not None and row.reversal_ms is not None and row.credit is not None:
        rating["reversal"] = {
            "sequence": row.corrects_sequence,
            "period": month_text(row.reversal_ms),
            "amount": money_text(row.credit.amount),
            "currency": row.credit.currency,
        }
    envelope = _envelope(row.facts, idempotency_key(row), RATED_TYPE, RATED_SCHEMA)
    return envelope | {"data": {**_data(row.facts), "rating": rating}}


def usage_facts_of(event: dict[str, Any]) -> UsageFacts:
    """The facts of a usage event in JSON, whatever else a later version added. Raises ValueError if it is none."""
    try:
        if event["specversion"] != SPEC_VERSION or event["type"] != EVENT_TYPE:
            raise ValueError(f"it is not a CloudEvent {SPEC_VERSION} of type {EVENT_TYPE}")
        time_ms = parse_instant(event["time"])
        if time_ms is None:
            raise ValueError("time is not an RFC 3339 instant")
        request, measured = event["data"]["request"], event["data"]["measured"]
        return UsageFacts(
            event_id=event["id"],
            tenant_id=event["subject"],
            source=event["source"],
            time_ms=time_ms,
            priority_class=PriorityClass(request["class"]),
            outcome=Outcome(request["outcome"]),
            corrects_id="",
            **{name: request[name] for name in _REQUEST},
            **{name: measured[name] for name in _MEASURED},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is not a usage event: {error}") from error


def _envelope(facts: UsageFacts, event_id: str, kind: str, schema: str) -> dict[str, Any]:
    return {
        "specversion": SPEC_VERSION,
        "id": event_id,
        "source": facts.source,
        "type": kind,
        "subject": facts.tenant_id,
        "time": instant_text(facts.time_ms),
        "datacontenttype": "application/json",
        "dataschema": schema,
    }


def _data(facts: UsageFacts) -> dict[str, Any]:
    request = {name: getattr(facts, name) for name in _REQUEST}
    request |= {"class": facts.priority_class.value, "outcome": facts.outcome.value}
    return {"request": request, "measured": {name: getattr(facts, name) for name in _MEASURED}}

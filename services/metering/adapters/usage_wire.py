"""Usage events and rated records between protobuf and the domain. Converted here and nowhere else in this service."""

from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.vocabulary import Outcome, PriorityClass
from roundhouse.wire.v1 import usage_pb2, vocabulary_pb2
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.periods import month_text
from services.metering.domain.rating import money_text
from services.metering.domain.usage import EVENT_TYPE, UsageFacts

_MONTHS_REMEMBERED: Final = 256
_TENANTS_REMEMBERED: Final = 4096  # subjects of the busiest tenants; a guess
_SOURCES: Final = {
    usage_pb2.TOKEN_SOURCE_UNSPECIFIED: "",
    usage_pb2.TOKEN_SOURCE_ENGINE: "engine",
    usage_pb2.TOKEN_SOURCE_GATEWAY: "gateway",
    usage_pb2.TOKEN_SOURCE_HEARTBEAT: "heartbeat",
}
_OUTCOMES: Final = frozenset(vocabulary_pb2.Outcome.values()) - {vocabulary_pb2.OUTCOME_UNSPECIFIED}
_SOURCES_TO_WIRE: Final = {name: value for value, name in _SOURCES.items()}


@lru_cache(_TENANTS_REMEMBERED)
def _subject_of(tenant_id: str) -> str:
    return subjects.usage(tenant_id)


def decode_event(subject: str, data: bytes) -> UsageFacts | str:
    """The facts of a message, or why it cannot be read. The text names fields, never contents."""
    event = usage_pb2.UsageEvent()
    try:
        event.ParseFromString(data)
    except DecodeError:
        return "it is not a UsageEvent"
    fault = _wire_fault(subject, event)
    return fault if fault is not None else _facts(event)


def _wire_fault(subject: str, event: usage_pb2.UsageEvent) -> str | None:
    """What the domain's facts can no longer show."""
    if event.type != EVENT_TYPE:
        return f"type is not {EVENT_TYPE}"
    if not event.HasField("data"):
        return "data is missing"
    if not event.subject or _subject_of(event.subject) != subject:
        return "the tenant is not the one that the message was sent for"  # invariant 16
    if event.data.outcome not in _OUTCOMES:
        return "outcome is unspecified or unknown"
    if event.data.counted_by not in _SOURCES:
        return "counted_by is unknown"
    return None


_DATA_FIELDS: Final = UsageFacts.__struct_fields__[4:]  # named as in UsageData, after id, tenant, source and time
_CLASS, _OUTCOME, _COUNTED_BY = map(_DATA_FIELDS.index, ("priority_class", "outcome", "counted_by"))
_read_data = attrgetter(*_DATA_FIELDS)


def _facts(event: usage_pb2.UsageEvent) -> UsageFacts:
    values: list[Any] = list(_read_data(event.data))
    values[_CLASS] = PriorityClass.from_wire(values[_CLASS])
    values[_OUTCOME] = Outcome.from_wire(values[_OUTCOME])
    values[_COUNTED_BY] = _SOURCES[values[_COUNTED_BY]]
    return UsageFacts(event.id, event.subject, event.source, event.time_unix_ms, *values)


def encode_event(facts: UsageFacts, *, corrects_id: str = "") -> usage_pb2.UsageEvent:
    """The event with these facts; the inverse of `decode_event`."""
    data = usage_pb2.UsageData(
        request_id=facts.request_id,
        attempt=facts.attempt,
        key_id=facts.key_id,
        model=facts.model,
        model_digest=facts.model_digest,
        adapter=facts.adapter,
        adapter_digest=facts.adapter_digest,
        priority_class=facts.priority_class.to_wire(),
        outcome=facts.outcome.to_wire(),
        status=facts.status,
        finish_reason=facts.finish_reason,
        input_tokens=facts.input_tokens,
        cached_tokens=facts.cached_tokens,
        output_tokens=facts.output_tokens,
        counted_by=_SOURCES_TO_WIRE[facts.counted_by],
        queue_ms=facts.queue_ms,
        stage_ms=facts.stage_ms,
        load_ms=facts.load_ms,
        first_token_ms=facts.first_token_ms,
        total_ms=facts.total_ms,
        run_ms=facts.run_ms,
        node_id=facts.node_id,
        operation=facts.operation,
        emitter=facts.emitter,
        corrects_id=corrects_id or facts.corrects_id,
    )
    return usage_pb2.UsageEvent(
        id=facts.event_id,
        source=facts.source,
        type=EVENT_TYPE,
        subject=facts.tenant_id,
        time_unix_ms=facts.time_ms,
        data=data,
    )


def rated_record(row: LedgerRow) -> usage_pb2.RatedRecord:
    """The billing record of a row. A correction names the event that it replaces, and says what it takes back."""
    corrects_id = row.facts.event_id if row.corrects_sequence is not None else ""
    record = usage_pb2.RatedRecord(
        sequence=row.sequence,
        idempotency_key=idempotency_key(row),
        event=encode_event(row.facts, corrects_id=corrects_id),
        price_id=row.rating.price_id,
        currency=row.rating.currency,
        amount=money_text(row.rating.amount),
        recorded_unix_ms=row.recorded_ms,
        kind=row.kind,
        period=_month(row.period_ms),
    )
    if row.corrects_sequence is not None and row.reversal_ms is not None:
        record.reversal.sequence = row.corrects_sequence
        record.reversal.period = _month(row.reversal_ms)
        if row.credit is not None:
            record.reversal.currency = row.credit.currency
            record.reversal.amount = money_text(row.credit.amount)
    return record


@lru_cache(_MONTHS_REMEMBERED)
def _month(start_ms: int) -> str:
    return month_text(start_ms)


def idempotency_key(row: LedgerRow) -> str:
    """The same for the same row, different for every other: source, tenant, event and revision, each encoded."""
    parts = (row.facts.source, row.facts.tenant_id, row.facts.event_id)
    return ".".join([*map(subjects.encode_token, parts), str(row.revision)])

"""Which events can be recorded, and what their wire form keeps."""

from typing import Any

import pytest

from services.metering.adapters.usage_wire import decode_event, encode_event, idempotency_key, rated_record
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.rating import rate
from services.metering.domain.usage import TIME_MS_END, fault_of
from tests.builders.usage import PRICE, usage_facts


def test_a_good_event_has_no_fault() -> None:
    """The builder's event is acceptable; so is one that consumed nothing."""
    assert fault_of(usage_facts()) is None
    assert fault_of(usage_facts(input_tokens=0, cached_tokens=0, output_tokens=0)) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"emitter": "loader"}, "emitter is neither gateway nor scheduler"),
        ({"corrects_id": "r0/1"}, "corrects_id is set by the ledger, not by emitters"),
        ({"time_ms": 0}, "time_unix_ms is out of range: 0"),
        ({"time_ms": TIME_MS_END}, f"time_unix_ms is out of range: {TIME_MS_END}"),
        ({"cached_tokens": 1001}, "cached_tokens exceed input_tokens: 1001 > 1000"),
        ({"output_tokens": -1}, "output_tokens is out of range: -1"),
        ({"model": ""}, "model is empty"),
        ({"request_id": ""}, "request_id is empty"),
        ({"node_id": "n\x00"}, "node_id holds a NUL character"),
        ({"key_id": "k" * 1025}, "key_id is longer than 1024 characters"),
    ],
)
def test_a_fault_names_its_field(change: dict[str, Any], fault: str) -> None:
    """The reason says what is wrong without showing texts of the event (invariant 16)."""
    assert fault_of(usage_facts(**change)) == fault


def test_the_wire_form_keeps_every_field() -> None:
    """Encoding and decoding is the identity, for a tenant whose name needs encoding too."""
    facts = usage_facts(tenant_id="a.b *")
    assert decode_event("rh.v1.usage.a=2Eb=20=2A", encode_event(facts).SerializeToString()) == facts


def test_what_cannot_be_read_says_why() -> None:
    """Each fault of the wire form has its reason."""
    event = encode_event(usage_facts())
    subject = "rh.v1.usage.t1"
    assert decode_event(subject, b"\xff") == "it is not a UsageEvent"
    assert decode_event(subject, b"") == "type is not roundhouse.usage.v1"
    wrong = "the tenant is not the one that the message was sent for"
    assert decode_event("rh.v1.usage.t2", event.SerializeToString()) == wrong
    event.data.outcome = 77  # type: ignore[assignment]  # a value of a later version
    assert decode_event(subject, event.SerializeToString()) == "outcome is unspecified or unknown"
    event.ClearField("data")
    assert decode_event(subject, event.SerializeToString()) == "data is missing"


def test_a_billing_record_of_a_correction_names_what_it_replaces() -> None:
    """Its key differs from the first row's, its amount is the whole one."""
    facts = usage_facts()
    first = LedgerRow(1, 0, facts, rate(facts, PRICE), recorded_ms=5)
    correction = LedgerRow(2, 1, facts, rate(facts, PRICE), recorded_ms=6, corrects_sequence=1)
    assert (idempotency_key(first), idempotency_key(correction)) == (
        "roundhouse.t1.r1=2F1.0",
        "roundhouse.t1.r1=2F1.1",
    )
    assert rated_record(first).event.data.corrects_id == ""
    record = rated_record(correction)
    assert (record.event.data.corrects_id, record.amount, record.sequence) == ("r1/1", "0.00492", 2)

"""Events of old emitters are read for ever, and what outsiders read keeps the shape that was published."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from roundhouse import subjects
from roundhouse.vocabulary import Outcome, PriorityClass
from roundhouse.wire.v1 import usage_pb2, vocabulary_pb2
from services.metering.adapters.cloud_events import rated_record_json, usage_event_json, usage_facts_of
from services.metering.adapters.usage_wire import decode_event, encode_event, idempotency_key, rated_record
from services.metering.domain.usage import COUNT_MAX
from tests.builders.usage import usage_facts
from tests.golden.make_usage_events import FOLDER, correction

SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schemas"
FIELDS = {
    usage_pb2.UsageEvent: "id source type subject time_unix_ms data",
    usage_pb2.UsageData: (
        "request_id attempt key_id model model_digest adapter adapter_digest priority_class outcome status"
        " finish_reason input_tokens cached_tokens output_tokens counted_by queue_ms stage_ms load_ms first_token_ms"
        " total_ms run_ms node_id operation emitter corrects_id"
    ),
    usage_pb2.RatedRecord: (
        "sequence idempotency_key event price_id currency amount recorded_unix_ms kind period reversal"
    ),
    usage_pb2.Reversal: "sequence period currency amount",
}
"""The fields of version 1 in the order of their numbers, from 1 on. Later ones may be added after these."""


def golden(name: str) -> bytes:
    """What was committed with version 1."""
    return (FOLDER / name).read_bytes()


@pytest.mark.parametrize("message", list(FIELDS), ids=lambda message: message.DESCRIPTOR.name)
def test_the_numbers_of_fields_stay(message: Any) -> None:
    """A number names one field for ever."""
    known = dict(enumerate(FIELDS[message].split(), start=1))
    found = {field.number: field.name for field in message.DESCRIPTOR.fields}
    assert {number: found.get(number) for number in known} == known


def test_an_old_event_on_the_wire_is_read_as_it_was_meant() -> None:
    """Every field of the golden bytes has the value that it was made with."""
    assert decode_event(subjects.usage("t1"), golden("usage_event.bin")) == usage_facts()


def test_an_old_event_without_the_fields_of_today_is_read() -> None:
    """An emitter that knows only what must be there."""
    least = usage_pb2.UsageEvent(
        id="r1/1", source="roundhouse", type="roundhouse.usage.v1", subject="t1", time_unix_ms=1,
        data=usage_pb2.UsageData(request_id="r1", model="m1", outcome=vocabulary_pb2.OUTCOME_DONE, emitter="gateway"),
    )  # fmt: skip
    facts = decode_event(subjects.usage("t1"), least.SerializeToString())
    assert not isinstance(facts, str)
    assert (facts.event_id, facts.input_tokens, facts.priority_class) == ("r1/1", 0, PriorityClass.STANDARD)


def test_an_event_with_fields_of_tomorrow_is_read() -> None:
    """Unknown fields are passed over: field 999 of the event, a varint."""
    later = golden("usage_event.bin") + bytes([(999 << 3) & 0x7F | 0x80, (999 << 3) >> 7, 7])
    assert decode_event(subjects.usage("t1"), later) == usage_facts()


def test_old_records_of_the_billing_stream_are_what_we_still_write() -> None:
    """The golden record is byte for byte today's."""
    assert rated_record(correction()).SerializeToString(deterministic=True) == golden("rated_record.bin")


@pytest.mark.parametrize(("name", "schema"), [("usage_event", "usage-event"), ("rated_record", "rated-record")])
def test_json_keeps_the_published_shape(name: str, schema: str) -> None:
    """The golden JSON is valid, and ours of today is the golden one."""
    published = json.loads((SCHEMAS / f"{schema}.v1.schema.json").read_text())
    old = json.loads(golden(f"{name}.json"))
    jsonschema_rs.Draft202012Validator(published).validate(old)
    incomplete = {key: value for key, value in old.items() if key != "data"}
    assert not jsonschema_rs.is_valid(published, incomplete)
    row = correction()
    assert old == (usage_event_json(row.facts) if name == "usage_event" else rated_record_json(row))


def test_old_json_is_read_with_whatever_was_added() -> None:
    """Keys that are not known are passed over; what is no event is refused."""
    event = json.loads(golden("usage_event.json"))
    event["data"]["measured"]["joules"] = 3
    event["traceparent"] = "00-1-2-01"
    assert usage_facts_of(event) == usage_facts()
    for broken in ({**event, "type": "other"}, {**event, "time": "soon"}, {**event, "data": {}}, {}):
        with pytest.raises(ValueError):
            usage_facts_of(broken)


counts = st.integers(0, COUNT_MAX)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@given(counts, counts, texts, st.sampled_from(PriorityClass), st.sampled_from(Outcome), st.integers(1, 10**13))
def test_json_and_protobuf_say_the_same(
    tokens: int, spent_ms: int, model: str, wanted: PriorityClass, outcome: Outcome, time_ms: int
) -> None:
    """Any event comes back as it was from both forms; the JSON is valid; the id depends on nothing else."""
    facts = replace(
        usage_facts(), input_tokens=tokens, cached_tokens=0, run_ms=spent_ms, model=model, priority_class=wanted,
        outcome=outcome, time_ms=time_ms,
    )  # fmt: skip
    event = json.loads(json.dumps(usage_event_json(facts)))
    assert usage_facts_of(event) == facts
    assert decode_event(subjects.usage("t1"), encode_event(facts).SerializeToString()) == facts
    assert event["id"] == "r1/1"


def test_the_idempotency_key_names_a_row() -> None:
    """The same row is the same key; another revision, tenant, event or source is another."""
    row = correction()
    others = [
        replace(row, revision=2),
        replace(row, facts=usage_facts(tenant_id="t2")),
        replace(row, facts=usage_facts("r2")),
        replace(row, facts=usage_facts(source="other")),
    ]
    assert len({idempotency_key(other) for other in [row, *others]}) == 5
    assert idempotency_key(replace(row, recorded_ms=99, sequence=7)) == idempotency_key(row)

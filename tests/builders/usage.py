"""Usage events for tests, with every field set to something that shows when it is swapped with another."""

from decimal import Decimal
from typing import Any

from msgspec.structs import replace

from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model, Price
from roundhouse.vocabulary import Digest, ModelName, Outcome, PriorityClass
from services.metering.adapters.usage_wire import encode_event
from services.metering.domain.ledger import Candidate, RawEvent
from services.metering.domain.rating import Rating, rate
from services.metering.domain.usage import UsageFacts

TIME_MS = 1_767_225_600_000 + 13 * 3_600_000 + 5 * 60_000  # 2026-01-01T13:05:00Z
PRICE = Price(id="p1", currency="USD", input="3", cached_input="0.3", output="15")


def usage_facts(request_id: str = "r1", **changes: Any) -> UsageFacts:
    """A gateway's event of tenant t1: 1,000 input tokens, 400 of them cached, 200 output tokens."""
    facts = UsageFacts(
        event_id=f"{request_id}/1",
        tenant_id="t1",
        source="roundhouse",
        time_ms=TIME_MS,
        request_id=request_id,
        attempt=1,
        key_id="k1",
        model="m1",
        model_digest="sha256:11",
        adapter="a1",
        adapter_digest="sha256:22",
        priority_class=PriorityClass.INTERACTIVE,
        outcome=Outcome.DONE,
        status=200,
        finish_reason="stop",
        input_tokens=1000,
        cached_tokens=400,
        output_tokens=200,
        counted_by="engine",
        queue_ms=11,
        stage_ms=12,
        load_ms=13,
        first_token_ms=14,
        total_ms=15,
        run_ms=16,
        node_id="n1",
        operation="chat",
        emitter="gateway",
        corrects_id="",
    )
    return replace(facts, **changes)


def abandoned(request_id: str = "r1", **changes: Any) -> UsageFacts:
    """What a scheduler writes for the same attempt when the gateway went silent: 50 output tokens until then."""
    silent: dict[str, Any] = {
        "outcome": Outcome.ABANDONED,
        "status": 499,
        "output_tokens": 50,
        "emitter": "scheduler",
        "counted_by": "heartbeat",
    }
    return usage_facts(request_id, **(silent | changes))


def candidate(facts: UsageFacts, rating: Rating | None = None) -> Candidate:
    """The event rated with `PRICE`, as it would come over the bus."""
    data = encode_event(facts).SerializeToString()
    return Candidate(facts, rating or rate(facts, PRICE), RawEvent("rh.v1.usage.t1", data))


def priced_catalogue() -> Catalogue:
    """Generation 1 with model m1 at `PRICE`."""
    model = Model(
        name=ModelName("m1"),
        source_path="/models/m1",
        engine=Engine.REFERENCE,
        interface=Interface.LLM,
        digest=Digest("sha256:11"),
        price=PRICE,
    )
    return Catalogue(generation=1, models={model.name: model})


AMOUNT = Decimal("0.00492")
"""Of `usage_facts` at `PRICE`: (600 × 3 + 400 × 0.3 + 200 × 15) / 1,000,000 = (1800 + 120 + 3000) / 1,000,000."""

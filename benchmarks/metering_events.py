"""The usage events and prices that the metering benchmarks use."""

import random

from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model, Price
from roundhouse.vocabulary import Digest, ModelName, Outcome, PriorityClass
from services.metering.domain.usage import UsageFacts


class CataloguePrices:
    """One generation with one priced model."""

    def __init__(self) -> None:
        model = Model(
            name=ModelName("assistant-7b"),
            source_path="/models/assistant-7b",
            engine=Engine.REFERENCE,
            interface=Interface.LLM,
            digest=Digest("sha256:" + "1" * 64),
            price=Price(id="assistant-7b-2026", input="0.15", cached_input="0.05", output="0.6"),
        )
        self.current = Catalogue(generation=1, models={model.name: model})
        self.not_ready_reason: str | None = None


def facts_of(number: int, chance: random.Random) -> UsageFacts:
    """Event `number`: one of 50 tenants and 200 adapters, 37 ms after the one before."""
    request_id = f"req-{chance.getrandbits(96):024x}"
    return UsageFacts(
        event_id=f"{request_id}/1",
        tenant_id=f"tenant-{number % 50}",
        source="roundhouse",
        time_ms=1_767_225_600_000 + number * 37,
        request_id=request_id,
        attempt=1,
        key_id=f"key-{number % 50}",
        model="assistant-7b",
        model_digest="sha256:" + "1" * 64,
        adapter=f"adapter-{number % 200}",
        adapter_digest="sha256:" + "2" * 64,
        priority_class=PriorityClass.STANDARD,
        outcome=Outcome.DONE,
        status=200,
        finish_reason="stop",
        input_tokens=chance.randrange(10, 4000),
        cached_tokens=chance.randrange(0, 10),
        output_tokens=chance.randrange(1, 800),
        counted_by="engine",
        queue_ms=12,
        stage_ms=0,
        load_ms=0,
        first_token_ms=180,
        total_ms=2400,
        run_ms=2300,
        node_id="node-1",
        operation="chat",
        emitter="gateway",
        corrects_id="",
    )

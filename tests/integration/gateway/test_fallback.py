"""A smaller model answers: prepared anew, said so, and billed as itself; only where tenant or caller allow it."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from roundhouse.catalogue.records import Catalogue
from roundhouse.vocabulary import Digest, ModelName, TenantId
from roundhouse.wire.v1 import scheduling_pb2 as wire
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import MESSAGES, chunks_of
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

SMALL_DIGEST = Digest("sha256:" + "ef" * 32)
BODY = {"model": "m", "messages": MESSAGES, "max_tokens": 2}


def with_fallback(folder: Path) -> Catalogue:
    """`m` names `small`; tenant t1 allows it, t2 does not."""
    big = llm_model(tokenizer_path=str(folder), fallback=ModelName("small"))
    small = llm_model("small", tokenizer_path=str(folder), digest=SMALL_DIGEST, context_tokens=256)
    made = catalogue(big, small)
    willing = msgspec.structs.replace(made.tenants[TenantId("t1")], fallback=True)
    return msgspec.structs.replace(made, tenants={**made.tenants, TenantId("t1"): willing})


@pytest.fixture
async def gateway(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway whose scheduler sends what it may to `small`."""
    made = with_fallback(random_checkpoint(tmp_path / "m"))
    async with running_gateway(nats_url, redis_url, made, node=FakeNode()) as running:
        running.scheduler.fallbacks["m"] = wire.Redirected(
            model="small", model_digest=SMALL_DIGEST, estimated_wait_ms=9_000, reason="it is loaded first"
        )
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_the_model_that_gave_it_and_so_does_the_bill(
    gateway: RunningGateway, stream: bool
) -> None:
    """Model and header say `small`, its version is submitted, one usage event names it, and nothing of `m` is left."""
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers["x-roundhouse-served-by"] == "small"
    model = chunks_of(answer.text)[0]["model"] if stream else answer.json()["model"]
    assert model == "small"
    [event] = await gateway.usage(1)
    assert (event.data.model, event.data.model_digest) == ("small", SMALL_DIGEST)
    first, second = gateway.scheduler.submitted
    assert (first.model, first.fallback_allowed) == ("m", True)
    assert (second.model, second.fallback_allowed) == ("small", False)
    assert gateway.scheduler.cancelled == []


@pytest.mark.parametrize(
    ("tenant", "headers", "served_by"),
    [
        ("t2", {}, "m"),
        ("t2", {"x-roundhouse-fallback": "allow"}, "small"),
        ("t1", {"x-roundhouse-fallback": "never"}, "m"),
    ],
)
async def test_the_caller_has_the_last_word(
    gateway: RunningGateway, tenant: str, headers: dict[str, str], served_by: str
) -> None:
    """The tenant's setting is the default; a header decides for one request."""
    async with gateway.client(tenant, **headers) as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
    assert answer.headers["x-roundhouse-served-by"] == answer.json()["model"] == served_by


async def test_a_header_that_says_neither_is_refused(gateway: RunningGateway) -> None:
    """400 with the header's name."""
    async with gateway.client(**{"x-roundhouse-fallback": "maybe"}) as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-roundhouse-fallback"


async def test_an_adapter_has_no_fallback(gateway: RunningGateway) -> None:
    """What `tuned` was tuned for is in no other model."""
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, "model": "tuned"})
    assert answer.json()["model"] == "tuned"
    assert not gateway.scheduler.submitted[0].fallback_allowed

"""A gateway that believes an issuer: its tokens call, are limited and billed as the tenant they name."""

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from roundhouse.catalogue.records import Limits
from roundhouse.http_server import serve_http
from roundhouse.wire.v1 import inference_pb2, inference_pb2_grpc
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

KEY = ECKey.generate_key("P-256", {"kid": "one"})
SAY = {**CHAT, "max_tokens": 2}


async def _keys(_: Request) -> JSONResponse:
    return JSONResponse(KeySet([KEY]).as_dict(private=False))


@pytest.fixture
async def trusting(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that takes tokens; tenant t1 may make 2 requests a minute."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    issuer = Starlette(routes=[Route("/keys", _keys)])
    async with serve_http(issuer, "127.0.0.1", 0) as port:
        names: dict[str, Any] = {
            "jwt_issuer": "https://issuer.example",
            "jwt_jwks_url": f"http://127.0.0.1:{port}/keys",
        }
        held = catalogue(model, limits=Limits(requests_per_minute=2))
        async with running_gateway(nats_url, redis_url, held, node=FakeNode(), **names) as running:
            yield running


@pytest.fixture
def token() -> Callable[..., str]:
    """Makes tokens that are good for a minute, changed."""

    def made(**claims: Any) -> str:
        good = {
            "iss": "https://issuer.example",
            "aud": "roundhouse",
            "sub": "alice@example.com",
            "exp": int(time.time()) + 60,
            "tenant": "t1",
            "scope": "inference",
        }
        return jwt.encode({"alg": "ES256", "kid": "one"}, {**good, **claims}, KEY)

    return made


async def test_a_token_calls_as_its_tenant(
    trusting: RunningGateway, token: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariants 13 and 16: the event says t1 and a subject by its hash; limits are t1's; nothing logs the token."""
    text = token()
    async with trusting.client(authorization=f"Bearer {text}") as client:
        assert "m" in (await client.get("/v1/models")).text
        first = await client.post("/v1/chat/completions", json=SAY)
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    async with trusting.client() as by_key:
        assert (await by_key.post("/v1/chat/completions", json=SAY)).status_code == 200
        assert (await by_key.post("/v1/chat/completions", json=SAY)).status_code == 429
    events = await trusting.usage(2)
    assert {event.subject for event in events} == {"t1"}
    [by_token] = [event for event in events if event.data.key_id.startswith("jwt-")]
    assert "alice" not in str(by_token)
    written = capsys.readouterr()
    assert text not in written.out + written.err
    assert "alice" not in written.out + written.err


async def test_a_token_works_over_grpc(trusting: RunningGateway, token: Callable[..., str]) -> None:
    """In the metadata, as a key."""
    metadata = (("authorization", f"Bearer {token()}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{trusting.addresses.grpc}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        cards = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    assert "m" in {card.name for card in cards.models}


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"exp": 1}, 401),
        ({"tenant": "nobody"}, 401),
        ({"scope": "usage:read"}, 403),
        ({"iss": "https://other.example"}, 401),
    ],
)
async def test_a_token_that_says_something_else_opens_nothing(
    trusting: RunningGateway, token: Callable[..., str], claims: dict[str, Any], status: int
) -> None:
    """Ended, of no tenant, without the scope, of another issuer; the answer repeats nothing of it."""
    text = token(**claims)
    async with trusting.client(authorization=f"Bearer {text}") as client:
        answer = await client.post("/v1/chat/completions", json=SAY)
    assert answer.status_code == status
    assert text not in answer.text
    assert trusting.scheduler.submitted == []

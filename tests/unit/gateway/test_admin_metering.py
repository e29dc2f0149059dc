"""Metering behind the admin API: operators may do everything, a tenant's key reads its own tenant and nothing else."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from roundhouse.errors import RoundhouseError
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.adapters.admin_metering import MeteringProxy
from services.gateway.adapters.http_errors import error_response
from services.gateway.domain.keys import ADMIN, INFERENCE, OPERATORS, USAGE_READ
from services.gateway.ports import Caller

READER = Caller(TenantId("acme"), KeyId("k1"), frozenset({USAGE_READ}), "h1")
OPERATOR = Caller(OPERATORS, KeyId("k0"), frozenset({ADMIN}), "h0")
TENANTS_MAY_READ = ["usage", "statements/2026-11", "export/2026-11"]


def echo(request: httpx.Request) -> httpx.Response:
    """Metering that answers with what it was asked."""
    seen = {"method": request.method, "path": request.url.path, "query": list(request.url.params.multi_items())}
    answer = json.dumps(seen | {"body": request.content.decode()}).encode()
    return httpx.Response(200, stream=httpx.ByteStream(answer), headers={"content-type": "application/json"})


@pytest.fixture
async def metering() -> AsyncIterator[httpx.AsyncClient]:
    """A client of such a metering."""
    async with httpx.AsyncClient(base_url="http://metering", transport=httpx.MockTransport(echo)) as client:
        yield client


async def call(metering: httpx.AsyncClient, caller: Caller, method: str, path: str, **more: Any) -> httpx.Response:
    """One call through the proxy."""
    proxy = MeteringProxy(metering)

    async def endpoint(request: Request) -> Response:
        try:
            return await proxy.forward(request, caller)
        except RoundhouseError as error:
            return error_response(error, request.url.path)

    app = Starlette(routes=[Route("/metering/{path:path}", endpoint, methods=["GET", "POST", "DELETE"])])
    async with httpx.AsyncClient(base_url="http://gateway", transport=httpx.ASGITransport(app=app)) as client:
        return await client.request(method, f"/metering/{path}", **more)


@pytest.mark.parametrize("path", TENANTS_MAY_READ)
async def test_a_tenants_key_reads_its_own_tenant_whatever_it_asks(metering: httpx.AsyncClient, path: str) -> None:
    """No parameter, its own name, or the name twice: metering is always asked for its own tenant, exactly once."""
    for query in ("", "?tenant=acme", "?tenant=acme&tenant=acme&limit=5"):
        answer = await call(metering, READER, "GET", path + query)
        assert answer.status_code == 200
        asked = answer.json()
        assert asked["path"] == f"/v1/{path}"
        assert [value for name, value in asked["query"] if name == "tenant"] == ["acme"]


@pytest.mark.parametrize("path", TENANTS_MAY_READ)
@pytest.mark.parametrize(
    "query", ["?tenant=globex", "?tenant=acme&tenant=globex", "?tenant=globex&tenant=acme", "?tenant="]
)
async def test_no_other_tenant_can_be_asked_for(metering: httpx.AsyncClient, path: str, query: str) -> None:
    """Another name in any place is 403, and metering is not asked at all (invariant 16)."""
    answer = await call(metering, READER, "GET", path + query)
    assert answer.status_code == 403
    assert answer.json()["error"]["param"] == "tenant"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("reconcile", "prices", "periods", "periods/2026-11", "costs", "webhooks")),
        *(("GET", path) for path in ("usage/", "Usage", "statements", "statements/2026-11/x", "export/../prices")),
        *(("POST", path) for path in ("usage", "periods/2026-11/close", "prices", "tenants/acme/erase")),
        ("DELETE", "webhooks/1"),
    ],
)
async def test_a_tenants_key_opens_nothing_else(metering: httpx.AsyncClient, method: str, path: str) -> None:
    """What is not for tenants is 403 or not there, whatever the spelling."""
    answer = await call(metering, READER, method, path)
    assert answer.status_code in (403, 404)


async def test_an_operator_may_do_everything_and_bodies_pass(metering: httpx.AsyncClient) -> None:
    """Method, path, query and body arrive as they were sent."""
    answer = await call(metering, OPERATOR, "POST", "periods/2026-11/close?a=1&a=2", json={"x": 1})
    asked = answer.json()
    assert (asked["method"], asked["path"], asked["query"]) == (
        "POST",
        "/v1/periods/2026-11/close",
        [["a", "1"], ["a", "2"]],
    )
    assert json.loads(asked["body"]) == {"x": 1}


async def test_a_path_cannot_leave_metering(metering: httpx.AsyncClient) -> None:
    """Dots, other hosts and control characters are no path."""
    for path in ("../secret", "%2e%2e/secret", "a//b", "@evil", "a%00b", "a%0d%0ab"):
        answer = await call(metering, OPERATOR, "GET", path)
        assert answer.status_code == 404 or answer.json()["path"].startswith("/v1/")


async def test_metering_away_is_503(metering: httpx.AsyncClient) -> None:
    """And says no more than that."""

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(base_url="http://metering", transport=httpx.MockTransport(refuse)) as away:
        answer = await call(away, OPERATOR, "GET", "prices")
    assert answer.status_code == 503
    assert INFERENCE not in answer.text


@pytest.mark.parametrize("caller", [READER, OPERATOR])
async def test_an_endless_body_is_refused_before_it_fills_the_memory(
    metering: httpx.AsyncClient, caller: Caller
) -> None:
    """Also of a GET, which tenants may make: 413 once more has come than metering takes, and no more is read."""
    given = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal given
        while given < 64 * 1024 * 1024:
            given += 1024 * 1024
            yield bytes(1024 * 1024)

    answer = await call(metering, caller, "GET", "usage", content=endless())
    assert answer.status_code == 413
    assert given <= 10 * 1024 * 1024

"""The OpenAPI page: it has every live route and every body, and what it allows never brings a fault of ours."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from services.gateway.adapters.openai_bodies import ChatBody, CompletionBody, EmbeddingBody
from services.gateway.adapters.openapi_page import WORDS, live_operations
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, until

EXAMPLES = 12  # of each operation; more find the same, slower


async def page(gateway: RunningGateway) -> Any:
    """The page as a program reads it."""
    async with gateway.client() as client:
        answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


async def test_every_live_route_is_described(gateway: RunningGateway) -> None:
    """No route without words, no words without a route, and every body with all its fields."""
    described = await page(gateway)
    live = set(live_operations(gateway.addresses.routes))
    told = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert live < told
    assert {path for _, path in told - live} == {"/health/live", "/health/ready"}
    assert told == set(WORDS)
    assert all(operation["summary"] for methods in described["paths"].values() for operation in methods.values())
    for kind in (ChatBody, CompletionBody, EmbeddingBody):
        assert set(described["components"]["schemas"][kind.__name__]["properties"]) == set(kind.__struct_fields__)


async def test_the_page_for_people_needs_a_key_and_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    """One HTML page without scripts, pictures or fonts."""
    async with gateway.client() as client:
        answer = await client.get("/docs")
    assert "/v1/chat/completions" in answer.text
    assert "http" not in answer.text.replace("<!doctype html>", "")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.timeout(300)
async def test_nothing_that_the_page_allows_is_a_fault_of_ours(gateway: RunningGateway, node: FakeNode) -> None:
    """Schemathesis over every operation: whatever it makes up, no answer is a 5xx, and nothing is left running."""
    await asyncio.to_thread(tried, gateway.url)
    await until(lambda: node.open_streams == 0, within_s=30)
    async with gateway.client() as client:
        assert (await client.get("/v1/models")).status_code == 200


def tried(url: str) -> None:
    """Call every operation with made-up values; raises on the first 5xx, naming it. Blocking."""
    headers = {"authorization": f"Bearer {KEYS['t1']}"}
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    labels: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        labels.add(operation.label)

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def called(case: Any) -> None:
            answer = case.call(headers={**headers, "x-request-deadline-ms": "20000"}, timeout=30)
            expected = answer.status_code == 503 and "/v2/" in case.path  # a model that no node has: come again
            if not expected:
                case.validate_response(answer, checks=[not_a_server_error])

        called()
    own_page = {"GET /openapi.json"}  # schemathesis leaves out where it read the page
    assert labels | own_page == {f"{method} {path}" for method, path in WORDS}

"""A budget through the whole mesh: spent in the ledger, known to the gateway, refused with what is left."""

import json
import time
from typing import Any

import httpx
import pytest
from redis import Redis

from roundhouse.budgets import budget_key, period_text, spent_field
from tests.e2e.catalogue import FRUGAL_MICRO
from tests.e2e.mesh import Mesh

pytestmark = pytest.mark.timeout(120)


def ask(mesh: Mesh, max_tokens: int) -> httpx.Response:
    """One request of the tenant with a budget. `story` costs 1 a million prompt tokens and 2 a million others."""
    body = {"model": "story", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {mesh.keys['frugal']}"}
    return httpx.post(f"{mesh.http_url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def cost(answer: httpx.Response) -> int:
    """Micro-units of an answer."""
    assert answer.is_success, answer.text
    usage = answer.json()["usage"]
    return int(usage["prompt_tokens"]) + 2 * int(usage["completion_tokens"])


def wait_for_spent(redis: Redis, wanted: int) -> None:
    """Until the store says so, and nothing is reserved any more."""
    key, field = budget_key("frugal"), spent_field(period_text("month", round(time.time() * 1000)), "USD")
    deadline = time.monotonic() + 30
    found: list[Any] = []
    while time.monotonic() < deadline:
        found = redis.hmget(key, [field, "reserved"])  # type: ignore[assignment]
        if int(found[0] or 0) == wanted and int(found[1] or 0) == 0:
            return
        time.sleep(0.02)
    raise TimeoutError(f"spent and reserved are {found}, not {wanted}")


def test_what_is_spent_comes_back_to_the_gateway_and_refuses_in_the_end(mesh: Mesh) -> None:
    """Answers until the most that the next may cost does not fit: 429 that says what is left; a smaller one still fits;
    the budget is never overspent."""
    with Redis.from_url(mesh.redis_url) as redis:
        spent = cost(ask(mesh, 50))
        wait_for_spent(redis, spent)
        while (answer := ask(mesh, 50)).is_success:
            spent += cost(answer)
            wait_for_spent(redis, spent)
        assert answer.status_code == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        error = json.loads(answer.text)["error"]
        left = (FRUGAL_MICRO - spent) / 1_000_000
        assert error["type"] == error["code"] == "insufficient_quota"
        assert f"has {left:.6f}".rstrip("0") + " left" in error["message"]
        spent += cost(ask(mesh, 2))
        wait_for_spent(redis, spent)
        assert spent <= FRUGAL_MICRO

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


def admin(mesh: Mesh, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the admin API made."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    answer = httpx.post(f"{mesh.admin_url}/admin/v1/{path}", json=body, headers=headers, timeout=30)
    made: dict[str, Any] = answer.raise_for_status().json()
    return made


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


def test_a_key_has_a_budget_of_its_own_that_its_successor_goes_on_with(mesh: Mesh) -> None:
    """60 micro-units for a key of a tenant without a budget: spent with it, refused to it and to its successor, and the
    tenant's other key goes on."""
    wish = {"tenant": "acme", "limits": {"budget": {"amount": "0.00006"}}}
    made = admin(mesh, "keys", wish)

    def say(key: str, max_tokens: int) -> httpx.Response:
        body = {"model": "story", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{mesh.http_url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    spent = cost(say(made["key"], 20))
    field = spent_field(period_text("month", round(time.time() * 1000)), "USD")
    with Redis.from_url(mesh.redis_url) as redis:
        deadline = time.monotonic() + 30
        while int(redis.hget(budget_key("acme", f"k:{made['key_id']}"), field) or 0) != spent:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    successor = admin(mesh, f"keys/{made['key_id']}/rotate", {"overlap_s": 60})
    for key in (made["key"], successor["key"]):
        refused = say(key, 30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert "of this key has" in refused.json()["error"]["message"]
    assert say(mesh.keys["acme"], 30).is_success

"""The query API over HTTP shapes, on the fake ledger."""

from typing import Any

import httpx
import pytest

from services.metering.adapters.usage_api import usage_api
from services.metering.domain.periods import DAY_MS
from tests.builders.usage import TIME_MS, candidate, usage_facts
from tests.fakes.ledger import FakeLedger

DIMENSIONS = "tenant, model, adapter, class, key, day, hour, request"


async def get(ledger: FakeLedger, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one call."""
    transport = httpx.ASGITransport(app=usage_api(ledger))
    async with httpx.AsyncClient(transport=transport, base_url="http://metering") as client:
        answer = await client.get(path)
        return answer.status_code, answer.json()


@pytest.fixture
async def ledger() -> FakeLedger:
    """Three events: two of t1 on two days, one of t2."""
    filled = FakeLedger()
    events = [usage_facts("r1"), usage_facts("r2", time_ms=TIME_MS + DAY_MS), usage_facts("r3", tenant_id="t2")]
    await filled.append([candidate(event) for event in events], now_ms=TIME_MS)
    return filled


async def test_usage_is_grouped_by_tenant_and_model_unless_told_otherwise(ledger: FakeLedger) -> None:
    """2 × 0.00492 for t1."""
    status, body = await get(ledger, "/v1/usage")
    assert status == 200
    assert body["next_cursor"] is None
    assert body["rows"][0] == {
        "tenant": "t1",
        "model": "m1",
        "requests": 2,
        "attempts": 2,
        "input_tokens": 2000,
        "cached_tokens": 800,
        "output_tokens": 400,
        "amount": "0.00984",
        "currency": "USD",
    }
    assert [row["tenant"] for row in body["rows"]] == ["t1", "t2"]


async def test_periods_are_written_as_days_and_hours_of_utc(ledger: FakeLedger) -> None:
    """And a filter of one tenant and one day leaves one event."""
    _, body = await get(ledger, "/v1/usage?group_by=day&tenant=t1")
    assert [row["day"] for row in body["rows"]] == ["2026-01-01", "2026-01-02"]
    _, body = await get(ledger, "/v1/usage?group_by=hour,key&tenant=t1&from=2026-01-01&to=2026-01-01T23:00:00%2B01:00")
    assert [(row["hour"], row["key"]) for row in body["rows"]] == [("2026-01-01T13:00Z", "k1")]
    _, body = await get(ledger, f"/v1/usage?from={TIME_MS + 1}&to={TIME_MS + 2}")
    assert body == {"rows": [], "next_cursor": None}


async def test_requests_come_with_everything_that_is_known(ledger: FakeLedger) -> None:
    """One row an attempt, with its times and outcome."""
    _, body = await get(ledger, "/v1/usage?group_by=request&limit=1")
    (row,) = body["rows"]
    assert (row["request_id"], row["attempt"], row["outcome"], row["status"]) == ("r1", 1, "done", 200)
    times = [row[name] for name in ("queue_ms", "stage_ms", "load_ms", "first_token_ms", "total_ms", "run_ms")]
    assert times == [11, 12, 13, 14, 15, 16]
    assert (row["node"], row["class"], row["time"]) == ("n1", "interactive", "2026-01-01T13:05:00.000Z")
    assert (row["amount"], row["price_id"]) == ("0.00492", "p1")


@pytest.mark.parametrize("group_by", ["tenant,day", "request", "hour", "class,adapter,key"])
async def test_pages_hold_every_row_once(ledger: FakeLedger, group_by: str) -> None:
    """Following cursors gives what one large page gives."""
    _, whole = await get(ledger, f"/v1/usage?group_by={group_by}")
    rows, cursor = [], ""
    while True:
        _, body = await get(ledger, f"/v1/usage?group_by={group_by}&limit=1&cursor={cursor}")
        rows += body["rows"]
        if (cursor := body["next_cursor"] or "") == "":
            break
    assert rows == whole["rows"]


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("group_by=colour", "group_by", f"group_by knows {DIMENSIONS}; not 'colour'"),
        ("group_by=day,hour", "group_by", "group_by takes day or hour, not both"),
        ("group_by=tenant,tenant", "group_by", "group_by names a dimension twice"),
        ("group_by=request,tenant", "group_by", "request cannot be combined with others"),
        ("limit=0", "limit", "limit must be a whole number from 1 to 1000"),
        ("limit=1e3", "limit", "limit must be a whole number from 1 to 1000"),
        ("from=yesterday", "from", "from must be a date, an RFC 3339 time with an offset, or Unix milliseconds"),
        ("to=2026-01-01T00:00:00", "to", "to must be a date, an RFC 3339 time with an offset, or Unix milliseconds"),
        ("from=2026-01-02&to=2026-01-02", "to", "to must be later than from"),
        ("cursor=abc", "cursor", "cursor is not one that this query returned"),
        ("group_by=request&cursor=WyJ0MSJd", "cursor", "cursor is not one that this query returned"),
        ("group_by=tenant&cursor=LTE=", "cursor", "cursor is not one that this query returned"),
    ],
)
async def test_a_bad_parameter_is_named(ledger: FakeLedger, query: str, param: str, message: str) -> None:
    """400 with the parameter and what it must be."""
    status, body = await get(ledger, f"/v1/usage?{query}")
    error = body["error"]
    assert (status, error["param"], error["message"]) == (400, param, message)


async def test_a_misspelt_parameter_does_not_widen_the_answer(ledger: FakeLedger) -> None:
    """`tennant=t1` must not show every tenant."""
    for path in ("/v1/usage", "/v1/reconcile"):
        status, body = await get(ledger, f"{path}?tennant=t1")
        assert (status, body["error"]["param"]) == (400, "tennant")


async def test_reconcile_says_where_ledger_and_billing_stand(ledger: FakeLedger) -> None:
    """Totals of what matches, positions of the whole ledger."""
    _, body = await get(ledger, "/v1/reconcile?tenant=t2")
    assert (body["sequence"], body["published_sequence"], body["outcomes"]) == (3, 0, {"done": 1})
    assert body["totals"][0]["amount"] == "0.00492"


async def test_a_lost_database_is_503(ledger: FakeLedger) -> None:
    """A retry may work."""
    ledger.away = True
    status, body = await get(ledger, "/v1/usage")
    assert (status, body["error"]["code"]) == (503, "unavailable")

"""Prices, closing and statements over HTTP, on a SQLite ledger; the hands of an operator at the end of a month."""

import csv
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from fastapi import APIRouter
from pyarrow import parquet

from services.metering.adapters.accounts_api import MoneyServices, accounts_router
from services.metering.adapters.signing import PeriodSigner, signature_holds
from services.metering.adapters.sql_accounts import SqlAccounts
from services.metering.adapters.sql_entries import SqlEntries
from services.metering.adapters.sql_erasure import SqlForgetting
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_prices import SqlPrices
from services.metering.adapters.sql_rerating import SqlRerating
from services.metering.adapters.usage_api import usage_api
from services.metering.domain.ledger import RawEvent
from services.metering.domain.periods import DAY_MS, month_start_ms, next_month_ms
from services.metering.domain.rating import sum_of
from services.metering.domain.usage import UsageFacts
from services.metering.money_ports import EntryQuery
from services.metering.operations.pricing import PriceKeeper
from services.metering.operations.recording import rated_item
from tests.builders.usage import TIME_MS, priced_catalogue, usage_facts
from tests.fakes.clock import ManualClock
from tests.fakes.prices import SetCatalogue

FEBRUARY_MS = next_month_ms(month_start_ms(TIME_MS))


@dataclass
class Office:
    """A ledger with its API, and the clock on the wall."""

    ledger: SqlLedger
    pricing: PriceKeeper
    clock: ManualClock
    client: httpx.AsyncClient

    async def record(self, *events: UsageFacts) -> None:
        """As the recorder does."""
        book = await self.pricing.book()
        items = [rated_item(event, RawEvent("s", b""), book) for event in events]
        await self.ledger.append(items, now_ms=self.clock.now_ms())

    async def get(self, path: str) -> Any:
        """JSON of a good answer."""
        answer = await self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200, **fields: Any) -> Any:
        """JSON of an answer."""
        answer = await self.client.post(path, json=body or fields)
        assert answer.status_code == status, answer.text
        return answer.json()


class NoStreams:
    """`StreamErasure` where there are none."""

    async def erase(self, tenant_id: str) -> None:
        """See `StreamErasure.erase`."""


@asynccontextmanager
async def office_on(folder: Path) -> AsyncIterator[tuple[Office, APIRouter]]:
    """An empty ledger in the first days of February 2026, with `priced_catalogue`; and its routes."""
    ledger = await SqlLedger.open(f"sqlite:///{folder}/ledger.sqlite3")
    clock = ManualClock(FEBRUARY_MS + 2 * DAY_MS)
    pricing = PriceKeeper(SetCatalogue(priced_catalogue()), SqlPrices(ledger.database), clock)
    signer = PeriodSigner(folder / "keys" / "signing.pem")
    accounts = SqlAccounts(ledger.database, cluster="test", sign=signer.sign)
    money = MoneyServices(
        accounts,
        SqlPrices(ledger.database),
        pricing,
        SqlRerating(ledger.database),
        SqlEntries(ledger.database),
        SqlForgetting(ledger.database),
        NoStreams(),
        ledger,
        clock,
    )
    routes = accounts_router(money)
    transport = httpx.ASGITransport(app=usage_api(ledger, routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://metering") as client:
        yield Office(ledger, pricing, clock, client), routes
    await ledger.close()


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    """See `office_on`."""
    async with office_on(tmp_path) as (made, _):
        yield made


async def test_a_closed_month_is_signed_and_stays_as_it_was(office: Office, tmp_path: Path) -> None:
    """Two events of January are signed as 2 × 0.00492; a third one, late, is billed in February as a correction."""
    await office.record(usage_facts("r1"), usage_facts("r2", tenant_id="t2"))
    closed = await office.post("/v1/periods/2026-01/close")
    assert closed["totals"][0]["amount"] == "0.00984"
    assert signature_holds(closed["document"], closed["signature"], closed["public_key"])
    assert not signature_holds(
        closed["document"].replace("0.00984", "0.00985"), closed["signature"], closed["public_key"]
    )
    assert "t1" not in closed["document"], "tenants are signed by pseudonym"
    assert (tmp_path / "keys" / "signing.pem").stat().st_mode & 0o777 == 0o600

    await office.record(usage_facts("r3"), usage_facts("r1"))
    assert await office.post("/v1/periods/2026-01/close") == closed, "closed again, it is what it was"
    january = await office.get("/v1/statements/2026-01?tenant=t1")
    february = await office.get("/v1/statements/2026-02?tenant=t1")
    assert (january["status"], january["totals"][0]["amount"]) == ("closed", "0.00492")
    assert (february["status"], february["totals"][0]["amount"]) == ("open", "0.00492")
    assert [line["usage_month"] for line in february["lines"]] == ["2026-01"]
    usage = await office.get("/v1/usage?group_by=day")
    assert [(row["day"], row["requests"]) for row in usage["rows"]] == [("2026-01-01", 3)], "usage stays in its own day"

    signed = {item["tenant"]: item["amount"] for item in json.loads(closed["document"])["tenants"]}
    assert signed[january["signed_as"]] == january["totals"][0]["amount"]
    verified = await office.get("/v1/periods/2026-01/verify")
    assert (verified["signature_holds"], verified["ledger_agrees"], verified["differences"]) == (True, True, [])


async def test_months_close_in_order_and_only_when_they_are_over(office: Office) -> None:
    """409 with the reason; nothing is changed."""
    await office.record(usage_facts("r1", time_ms=TIME_MS - 40 * DAY_MS), usage_facts("r2"))
    told = await office.post("/v1/periods/2026-02/close", status=409)
    assert told["error"]["message"] == "2026-02 is not over yet"
    told = await office.post("/v1/periods/2026-01/close", status=409)
    assert told["error"]["message"] == "months are closed in order: 2025-11 is still open"
    assert (await office.client.get("/v1/periods/2025-11")).status_code == 404
    await office.post("/v1/periods/2025-11/close")
    await office.post("/v1/periods/2026-01/close")
    told = await office.post("/v1/periods/2025-12/close", status=409)
    assert "is closed already" in told["error"]["message"]
    assert (await office.client.post("/v1/periods/January/close")).status_code == 400


NEW = {"id": "m1-later", "model": "m1", "from": "2026-01-01T13:00:00Z", "input": "1", "output": "1"}


async def test_new_prices_hold_for_their_own_time_and_recorded_usage_only_after_rating_again(office: Office) -> None:
    """600 + 400 × 0 + 200 = 800 per million at the new price instead of 4,920: corrections of −0.00412 each, once."""
    await office.record(usage_facts("r1"), usage_facts("r2"), usage_facts("old", time_ms=TIME_MS - 3_600_000))
    assert (await office.post("/v1/prices", prices=[NEW], dry_run=True))["added"][0]["id"] == "m1-later"
    assert len((await office.get("/v1/prices"))["prices"]) == 1, "a dry run adds nothing"
    await office.post("/v1/prices", prices=[NEW])
    assert (await office.post("/v1/prices", prices=[NEW]))["added"] == [], "applied again, nothing is new"
    office.clock.advance(2_000)

    would = await office.post("/v1/prices/rerate", {"from": "2026-01-01", "to": "2026-02-01", "dry_run": True})
    did = await office.post("/v1/prices/rerate", {"from": "2026-01-01", "to": "2026-02-01"})
    again = await office.post("/v1/prices/rerate", {"from": "2026-01-01", "to": "2026-02-01"})
    assert (did["examined"], did["corrected"], did["difference"]) == (3, 2, {"USD": "-0.00824"})
    assert did["moves"] == [{"from": "p1", "to": "m1-later", "rows": 2}]
    assert {**would, "dry_run": False} == did
    assert (again["corrected"], again["difference"]) == (0, {})
    rows = (await office.get("/v1/usage?group_by=request"))["rows"]
    assert [(row["amount"], row["corrects_sequence"]) for row in rows] == [
        ("0.00492", None),
        ("0.0008", 1),
        ("0.0008", 2),
    ]


async def test_rating_again_after_the_close_books_the_difference_in_the_next_month(office: Office) -> None:
    """January keeps 0.00492; February has −0.00492 and +0.0008, which is −0.00412."""
    await office.record(usage_facts("r1"))
    await office.post("/v1/periods/2026-01/close")
    await office.post("/v1/prices", prices=[NEW])
    office.clock.advance(2_000)
    assert (await office.post("/v1/prices/rerate"))["corrected"] == 1
    january = await office.get("/v1/statements/2026-01?tenant=t1")
    february = await office.get("/v1/statements/2026-02?tenant=t1")
    assert [january["totals"][0]["amount"], february["totals"][0]["amount"]] == ["0.00492", "-0.00412"]
    assert [(line["price_id"], line["requests"], line["amount"]) for line in february["lines"]] == [
        ("m1-later", 1, "0.0008"),
        ("p1", -1, "-0.00492"),
    ]
    assert (await office.get("/v1/periods/2026-01/verify"))["ledger_agrees"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": "abc"}, "prices[0].input"),
        ({"input": "0.0000000000001"}, "prices[0].input"),
        ({"output": "-1"}, "prices[0].output"),
        ({"from": "soon"}, "prices[0].from"),
        ({"to": "2025-01-01"}, "prices[0].to"),
        ({"class": "fast"}, "prices[0].class"),
        ({"currency": "usd"}, "prices[0].currency"),
        ({"id": ""}, "prices[0].id"),
    ],
)
async def test_a_price_that_is_wrong_is_refused_by_name(office: Office, change: dict[str, str], param: str) -> None:
    """And nothing is added."""
    before = await office.get("/v1/prices")
    told = await office.post("/v1/prices", status=400, prices=[NEW | change])
    assert told["error"]["param"] == param
    assert await office.get("/v1/prices") == before


async def test_a_price_is_never_changed(office: Office) -> None:
    """The same id or the same instant with other amounts is a conflict."""
    await office.post("/v1/prices", prices=[NEW])
    before = await office.get("/v1/prices")
    await office.post("/v1/prices", status=409, prices=[NEW | {"input": "2"}])
    await office.post("/v1/prices", status=409, prices=[NEW | {"id": "other", "input": "2"}])
    assert await office.get("/v1/prices") == before


async def test_statements_for_people_and_for_spreadsheets(office: Office) -> None:
    """Text with a total; CSV in which a name cannot become a formula."""
    await office.record(usage_facts("r1"), usage_facts("r2", model="=1+1"))
    text = (await office.client.get("/v1/statements/2026-01?tenant=t1&format=text")).text
    assert "Statement of t1 for 2026-01" in text
    assert "0.00492 USD" in text
    assert "This month is open" in text
    rows = (await office.client.get("/v1/statements/2026-01?tenant=t1&format=csv")).text.splitlines()
    assert rows[0].startswith("usage_month,model,adapter,class,price_id,requests")
    assert rows[1] == "2026-01,'=1+1,a1,interactive,,1,1,1000,400,200,0,"
    assert (await office.client.get("/v1/statements/2026-01")).status_code == 400


async def test_an_export_adds_up_to_the_statement(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """CSV and Parquet in pages of two rows: every entry once, and what is taken back; sums are the statement's."""
    monkeypatch.setattr(EntryQuery, "__init__", partialmethod(EntryQuery.__init__, limit=2))
    await office.record(*(usage_facts(f"r{n}") for n in range(5)), usage_facts("other", tenant_id="t2"))
    await office.post("/v1/periods/2026-01/close")
    await office.post("/v1/prices", prices=[NEW])
    office.clock.advance(2_000)
    await office.post("/v1/prices/rerate")
    for month, entries in (("2026-01", 5), ("2026-02", 10)):
        statement = await office.get(f"/v1/statements/{month}?tenant=t1")
        answer = await office.client.get(f"/v1/export/{month}?tenant=t1&format=csv")
        lines = list(csv.DictReader(answer.text.splitlines()))
        assert len(lines) == entries
        assert sum_of(Decimal(line["amount"]) for line in lines) == Decimal(statement["totals"][0]["amount"])
        answer = await office.client.get(f"/v1/export/{month}?tenant=t1&format=parquet")
        table = parquet.read_table(pa.BufferReader(answer.content)).to_pylist()
        assert [(row["sequence"], row["kind"], row["output_tokens"]) for row in table] == [
            (int(line["sequence"]), line["kind"], int(line["output_tokens"])) for line in lines
        ]
        assert sum_of(row["amount"] for row in table) == Decimal(statement["totals"][0]["amount"])
        answer = await office.client.get(f"/v1/export/{month}?tenant=t1&format=jsonl")
        ratings = [json.loads(line)["data"]["rating"] for line in answer.text.splitlines()]
        taken_back = [rating["reversal"]["amount"] for rating in ratings if "reversal" in rating]
        total = sum_of(Decimal(rating["amount"]) for rating in ratings) - sum_of(map(Decimal, taken_back))
        assert total == Decimal(statement["totals"][0]["amount"])
    everybody = list(csv.DictReader((await office.client.get("/v1/export/2026-01")).text.splitlines()))
    assert {line["tenant"] for line in everybody} == {"t1", "t2"}
    assert (await office.client.get("/v1/export/2026-01?format=xls")).status_code == 400


async def test_an_erasure_is_one_call(office: Office) -> None:
    """The name is gone from every answer, the sums are not, and the closed month still verifies."""
    await office.record(usage_facts("r1"), usage_facts("r2", tenant_id="t2"))
    await office.post("/v1/periods/2026-01/close")
    erased = await office.post("/v1/tenants/t1/erase")
    assert (erased["rows"], erased["pseudonym"][0]) == (1, "~")
    rows = (await office.get("/v1/usage?group_by=tenant"))["rows"]
    assert [(row["tenant"], row["amount"]) for row in rows] == [("t2", "0.00492"), (erased["pseudonym"], "0.00492")]
    verified = await office.get("/v1/periods/2026-01/verify")
    assert (verified["signature_holds"], verified["ledger_agrees"]) == (True, True)


async def test_the_stream_is_published_again_from_a_sequence(office: Office) -> None:
    """Three rows published; from 2 on, two rows wait again."""
    await office.record(*(usage_facts(f"r{n}") for n in range(3)))
    await office.ledger.claim_unpublished("a", now_ms=0, lease_ms=1, limit=9)
    await office.ledger.mark_published("a", sequence=3, turn=0)
    assert (await office.post("/v1/billing/republish", from_sequence=2))["rows"] == 2
    assert await office.ledger.unpublished() == 2
    await office.post("/v1/billing/republish", status=400, from_sequence=0)

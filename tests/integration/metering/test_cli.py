"""`roundhouse usage`, `prices` and `webhooks` against metering's own API, as the gateway's admin API passes it on."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from typer.testing import CliRunner, Result

from roundhouse.cli.app import app as roundhouse
from roundhouse.http_server import serve_http
from services.metering.adapters.costs_api import CostServices, costs_router
from services.metering.adapters.quarantine_api import quarantine_router
from services.metering.adapters.sql_nodes import SqlNodeHours
from services.metering.adapters.sql_webhooks import SqlWebhooks
from services.metering.adapters.usage_api import usage_api
from services.metering.adapters.webhook_http import HttpPoster
from services.metering.adapters.webhooks_api import WebhookServices, webhooks_router
from services.metering.domain.ledger import RawEvent, Rejected
from tests.builders.usage import candidate, usage_facts
from tests.integration.metering.test_accounts_api import Office, office_on

PRICES = """
prices:
  - {id: m1-later, model: m1, from: 2026-01-01T13:00:00Z, input: 1, output: 1}
"""


class Desk:
    """A terminal with the admin API in reach, and the ledger behind it."""

    def __init__(self, port: int, office: Office) -> None:
        self.office = office
        self._environment = {"ROUNDHOUSE_ADMIN_URL": f"http://127.0.0.1:{port}", "ROUNDHOUSE_ADMIN_KEY": "k"}

    async def try_(self, *arguments: str) -> Result:
        """One command, to its end."""
        runner = CliRunner(env=self._environment)
        return await asyncio.to_thread(runner.invoke, roundhouse, list(arguments))

    async def run(self, *arguments: str) -> str:
        """What a command that works prints."""
        done = await self.try_(*arguments)
        assert done.exit_code == 0, done.output
        return str(done.output)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """Two events of January 2026; it is the third of February."""
    async with office_on(tmp_path) as (office, accounts):
        clock = office.clock
        webhooks = WebhookServices(SqlWebhooks(office.ledger.database), HttpPoster(allow_private=True), clock)
        costs = CostServices(SqlNodeHours(office.ledger.database), {}, "USD", clock)
        quarantine = quarantine_router(office.ledger, office.pricing, clock)
        metering = usage_api(office.ledger, accounts, webhooks_router(webhooks), costs_router(costs), quarantine)
        gateway = FastAPI()

        @gateway.get("/admin/v1/usage")
        async def usage() -> JSONResponse:
            return JSONResponse(await office.get("/v1/usage?group_by=tenant,day"))

        @gateway.middleware("http")
        async def pass_on(request, call_next):  # type: ignore[no-untyped-def]
            if request.url.path.startswith("/admin/v1/metering/"):
                request.scope["path"] = "/metering/v1/" + request.url.path.removeprefix("/admin/v1/metering/")
            return await call_next(request)

        gateway.mount("/metering", metering)
        await office.record(usage_facts("r1"), usage_facts("r2", tenant_id="t2"))
        async with serve_http(gateway, "127.0.0.1", 0) as port:
            yield Desk(port, office)
        await webhooks.poster.close()  # type: ignore[attr-defined]


async def test_the_end_of_a_month(desk: Desk, tmp_path: Path) -> None:
    """Close, verify, statements, exports; an untrusted key fails the verification with exit code 1."""
    assert "0.00984" in await desk.run("usage", "close", "2026-01")
    assert "2026-01" in await desk.run("usage", "periods")
    verified = await desk.run("usage", "verify", "2026-01")
    assert "signature: good" in verified
    assert "ledger: as signed" in verified
    other = await desk.try_("usage", "verify", "2026-01", "--public-key", "A" * 43 + "=")
    assert (other.exit_code, "signature: BAD" in other.output) == (1, True)
    assert "Statement of t1 for 2026-01" in await desk.run("usage", "statement", "2026-01", "--tenant", "t1")
    await desk.run("usage", "statement", "2026-01", "--as", "json", "--directory", str(tmp_path / "out"))
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert {name: body["totals"][0]["amount"] for name, body in written.items()} == {
        "2026-01-t1.json": "0.00492",
        "2026-01-t2.json": "0.00492",
    }
    for kind, start in (("csv", b"sequence,"), ("jsonl", b"{"), ("parquet", b"PAR1")):
        target = tmp_path / f"january.{kind}"
        await desk.run("usage", "export", "2026-01", "--to", str(target))
        assert target.read_bytes().startswith(start)
    refused = await desk.try_("usage", "close", "2026-02")
    assert (refused.exit_code, "2026-02 is not over yet" in refused.output) == (1, True)
    assert "2 rows are published again" not in await desk.run("usage", "republish", "--from", "1")


async def test_prices_and_rating_again(desk: Desk, tmp_path: Path) -> None:
    """Apply, list, try, do, and nothing is left."""
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    assert "1 would be added" in await desk.run("prices", "apply", "-f", str(file), "--dry-run")
    assert "1 added" in await desk.run("prices", "apply", "-f", str(file))
    assert "m1-later" in await desk.run("prices", "list", "--model", "m1")
    desk.office.clock.advance(2_000)
    assert "2 would be corrected" in await desk.run("prices", "rerate", "--from", "2026-01-01", "--dry-run")
    assert "difference: -0.00824 USD" in await desk.run("prices", "rerate", "--from", "2026-01-01")
    assert "0 corrected" in await desk.run("prices", "rerate", "--from", "2026-01-01")
    file.write_text("prices: [3]")
    assert (await desk.try_("prices", "apply", "-f", str(file))).exit_code == 1


async def test_the_quarantine_is_shown_and_tried_again(desk: Desk) -> None:
    """One event lacks nothing by now, one can never be read; a list does not create or need a ledger of its own."""
    good = candidate(usage_facts("r9")).raw
    bad = Rejected(RawEvent("rh.v1.usage.t1", b"?"), "not an event")
    await desk.office.ledger.append([bad, Rejected(good, "no price was known")], now_ms=1)
    listed = json.loads(await desk.run("usage", "quarantine", "list", "-o", "json"))
    assert {event["reason"]: event["bytes"] for event in listed} == {
        "not an event": 1,
        "no price was known": len(good.data),
    }
    assert "1 still quarantined, 1 recorded" in await desk.run("usage", "quarantine", "replay")
    left = await desk.run("usage", "quarantine", "list")
    assert ("not an event" in left, "no price was known" in left) == (True, False)


async def test_tables_and_plots(desk: Desk) -> None:
    """A table with its total, a drawing over days and one of bars, data for programs."""
    table = await desk.run("usage", "--by", "tenant,day")
    assert "total" in table
    assert "0.00984" in table
    assert "2026-01-01" in await desk.run("usage", "--by", "tenant,day", "--plot", "output_tokens")
    assert "amount USD" in await desk.run("usage", "--by", "tenant", "--plot", "amount")
    assert len(json.loads(await desk.run("usage", "--by", "tenant,day", "-o", "json"))) == 2
    assert "not a measurement" in await desk.run("usage", "costs")


async def test_webhooks_by_hand(desk: Desk) -> None:
    """Add, list, send again, look at the dead, remove."""
    added = await desk.run("webhooks", "add", "http://127.0.0.1:9/hook", "--tenant", "t1")
    assert added.startswith("whsec_")
    (found,) = json.loads(await desk.run("webhooks", "list", "-o", "json"))
    assert "begins again at 1" in await desk.run("webhooks", "again", found["id"], "--from", "1")
    assert json.loads(await desk.run("webhooks", "dead", found["id"], "-o", "json")) == []
    assert "is removed" in await desk.run("webhooks", "remove", found["id"])
    assert (await desk.try_("webhooks", "remove", found["id"])).exit_code == 1


async def test_an_erasure_is_asked_about(desk: Desk) -> None:
    """Without --yes nothing happens unless it is confirmed."""
    assert (await desk.try_("usage", "erase", "t1")).exit_code == 1
    assert "1 rows of t1 now belong to ~" in await desk.run("usage", "erase", "t1", "--yes")

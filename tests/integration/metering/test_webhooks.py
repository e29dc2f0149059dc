"""Webhooks against a real HTTP server that fails, hangs, hangs up and repeats; and addresses that are off limits."""

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from services.metering.adapters.cloud_events import rated_record_json
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_webhooks import SqlWebhooks
from services.metering.adapters.usage_api import usage_api
from services.metering.adapters.webhook_http import HttpPoster
from services.metering.adapters.webhooks_api import WebhookServices, webhooks_router
from services.metering.domain.webhooks import RETRY_AFTER_MS
from services.metering.operations.webhooks import WebhookSender, encode_with
from tests.builders.usage import AMOUNT, abandoned, candidate, usage_facts
from tests.fakes.clock import ManualClock


@dataclass
class Receiver:
    """A customer's server: keeps what it got, answers as its script says, then 200."""

    port: int = 0
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    script: list[int | str] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}/hook?team=1"

    def sequences(self) -> list[int]:
        """Of the records it got, in order."""
        return [json.loads(body)["data"]["rating"]["sequence"] for _, body in self.got]


def handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    """Its request handler."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            step = receiver.script.pop(0) if receiver.script else 200
            if step == "hang":
                receiver.release.wait(60)
            elif step == "hang up":
                self.connection.close()
            else:
                self.send_response(int(step))
                self.send_header("content-length", "0")
                self.send_header("location", "http://127.0.0.1:1/")
                self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that runs."""
    made = Receiver()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(made))
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.release.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


@dataclass
class Desk:
    """A ledger, its webhooks and their API."""

    ledger: SqlLedger
    store: SqlWebhooks
    clock: ManualClock
    sender: WebhookSender
    client: httpx.AsyncClient

    async def add(self, url: str, **more: Any) -> dict[str, Any]:
        """A new endpoint from the first record on."""
        answer = await self.client.post("/v1/webhooks", json={"url": url, "from_sequence": 1, **more})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def record(self, *names: str, tenant: str = "t1") -> None:
        """Rows in the ledger."""
        await self.ledger.append([candidate(usage_facts(name, tenant_id=tenant)) for name in names], now_ms=1)

    async def shown(self) -> dict[str, Any]:
        """The first endpoint as operators see it."""
        found: dict[str, Any] = (await self.client.get("/v1/webhooks")).json()["webhooks"][0]
        return found


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """With private addresses allowed, as on a developer's machine, and half a second an attempt."""
    ledger = await SqlLedger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    store, clock = SqlWebhooks(ledger.database), ManualClock()
    poster = HttpPoster(allow_private=True, attempt_s=0.5)
    sender = WebhookSender(store, poster, encode_with(rated_record_json), clock, Random(5), holder="test")
    api = usage_api(ledger, webhooks_router(WebhookServices(store, poster, clock)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://metering") as client:
        yield Desk(ledger, store, clock, sender, client)
    await poster.close()
    await ledger.close()


async def test_records_come_in_order_signed_and_once(desk: Desk, receiver: Receiver) -> None:
    """Three records; each signature holds for its own id, time and body; nothing comes again."""
    secret = (await desk.add(receiver.url))["secret"]
    await desk.record("r1", "r2", "r3")
    await desk.sender.turn()
    await desk.sender.turn()
    assert receiver.sequences() == [1, 2, 3]
    for headers, body in receiver.got:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(secret.removeprefix("whsec_"))
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert headers["webhook-id"] == json.loads(body)["id"]
        assert headers["content-type"] == "application/cloudevents+json"
        assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert (await desk.shown())["behind"] == 0
    assert secret not in json.dumps(await desk.shown())


@pytest.mark.parametrize("fault", [500, 302, 429, "hang", "hang up"])
async def test_a_record_that_is_not_taken_holds_up_the_next_and_comes_again(
    desk: Desk, receiver: Receiver, fault: int | str
) -> None:
    """The second fails twice: 1, 2, 2, 2, 3 with the waits of the schedule between, always under the same id."""
    await desk.add(receiver.url)
    await desk.record("r1", "r2", "r3")
    receiver.script = [200, fault, fault]
    await desk.sender.turn()
    shown = await desk.shown()
    assert (shown["attempts"], shown["behind"], shown["state"]) == (1, 2, "active")
    assert shown["last_error"]
    await desk.sender.turn()
    assert receiver.sequences() == [1, 2], "not before its time"
    for wait_ms in RETRY_AFTER_MS[:2]:
        desk.clock.advance(round(wait_ms * 1.3))
        await desk.sender.turn()
    assert receiver.sequences() == [1, 2, 2, 2, 3]
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 3
    assert (await desk.shown())["last_error"] == ""


async def test_what_is_never_taken_is_put_aside_and_can_be_sent_again(desk: Desk, receiver: Receiver) -> None:
    """One attempt and every retry fail: the record is dead, the next one is sent; sent again from there, both come."""
    endpoint = (await desk.add(receiver.url))["id"]
    await desk.record("r1", "r2")
    receiver.script = [500] * (len(RETRY_AFTER_MS) + 1)
    for wait_ms in (0, *RETRY_AFTER_MS):
        desk.clock.advance(round(wait_ms * 1.3))
        await desk.sender.turn()
    assert receiver.sequences() == [1] * 11 + [2]
    dead = (await desk.client.get(f"/v1/webhooks/{endpoint}/dead")).json()["dead"]
    assert [(item["sequence"], item["reason"]) for item in dead] == [(1, "HTTP 500")]
    await desk.client.post(f"/v1/webhooks/{endpoint}/again", json={"from_sequence": 1})
    await desk.sender.turn()
    assert receiver.sequences()[-2:] == [1, 2]
    assert (await desk.client.get(f"/v1/webhooks/{endpoint}/dead")).json()["dead"] == []


async def test_gone_switches_the_endpoint_off(desk: Desk, receiver: Receiver) -> None:
    """410: nothing more is sent."""
    await desk.add(receiver.url)
    await desk.record("r1", "r2")
    receiver.script = [410]
    await desk.sender.turn()
    desk.clock.advance(10**9)
    await desk.sender.turn()
    assert receiver.sequences() == [1]
    assert (await desk.shown())["state"] == "disabled"


async def test_an_endpoint_of_one_tenant_gets_no_others_records(desk: Desk, receiver: Receiver) -> None:
    """t1's records are passed over, also a thousand of them; a correction says what it takes back."""
    await desk.add(receiver.url, tenant="t2")
    await desk.record(*(f"r{n}" for n in range(500)))
    await desk.ledger.append([candidate(abandoned("x", tenant_id="t2"))], now_ms=1)
    await desk.record("x", tenant="t2")
    await desk.sender.turn()
    assert receiver.sequences() == [501, 502]
    rating = json.loads(receiver.got[1][1])["data"]["rating"]
    assert (rating["kind"], rating["reversal"]["sequence"], Decimal(rating["amount"])) == ("supersedes", 501, AMOUNT)
    assert (await desk.shown())["behind"] == 0


async def test_two_senders_share_one_endpoint_without_doubling(desk: Desk, receiver: Receiver) -> None:
    """The lease lets one of them in at a time."""
    await desk.add(receiver.url)
    await desk.record(*(f"r{n}" for n in range(30)))
    poster = HttpPoster(allow_private=True)
    other = WebhookSender(desk.store, poster, encode_with(rated_record_json), desk.clock, Random(6), holder="other")
    await asyncio.gather(desk.sender.turn(), other.turn())
    await poster.close()
    assert receiver.sequences() == list(range(1, 31))


@pytest.mark.parametrize(
    "url",
    [
        "http://93.184.216.34/",
        "https://127.0.0.1/",
        "https://localhost/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://10.1.2.3/",
        "https://169.254.169.254/latest/meta-data",
        "https://0.0.0.0/",
        "https://2130706433/",
        "https://user:pass@example.com/",
        "ftp://example.com/",
        "https:///",
        "nonsense",
    ],
)
async def test_no_private_address_is_reached_through_us(url: str) -> None:
    """Refused before any connection, by what the name resolves to and not by how it is written."""
    poster = HttpPoster(allow_private=False)
    answer = await poster.post(url, {}, b"{}")
    await poster.close()
    assert answer.status == 0
    assert "ConnectError" not in answer.reason


async def test_an_address_that_can_never_be_used_is_refused_when_it_is_added(desk: Desk) -> None:
    """400, and a secret that is too short too."""
    for body in ({"url": "ftp://x"}, {"url": "https://x", "secret": "whsec_c2hvcnQ="}):
        assert (await desk.client.post("/v1/webhooks", json=body)).status_code == 400
    assert (await desk.client.delete("/v1/webhooks/wh-none")).status_code == 404

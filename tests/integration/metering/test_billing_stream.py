"""The billing stream as consumers see it: killed with -9, lost with all its records, and still every cent once."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from nats.js.errors import NotFoundError

from examples.billing_consumer import Invoices
from roundhouse import subjects
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.wire.v1 import usage_pb2
from services.metering.adapters.billing_stream import JetStreamBilling
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.operations.publishing import Publisher
from tests.builders.usage import AMOUNT, abandoned, candidate, usage_facts
from tests.fakes.clock import ManualClock

ROWS = 400


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    """A bus whose billing stream is new."""
    connected = await connect_bus(nats_url, name="test")
    await lose_stream(connected)
    yield connected
    await connected.close()


async def lose_stream(bus: NatsBus) -> None:
    """As if its disk were gone."""
    with suppress(NotFoundError):
        await bus.jetstream.delete_stream(subjects.BILLING_STREAM)
    await bus.ensure_streams()


async def publish_all(publisher: Publisher, ledger: SqlLedger) -> None:
    """Until nothing waits."""
    while await ledger.unpublished():
        await publisher.turn()


async def taken_by(bus: NatsBus, name: str) -> None:
    """Wait until a consumer has acknowledged everything."""
    async with asyncio.timeout(40):
        while True:
            with suppress(NotFoundError):
                info = await bus.jetstream.consumer_info(subjects.BILLING_STREAM, name)
                if not info.num_pending and not info.num_ack_pending:
                    return
            await asyncio.sleep(0.05)


def consumer(nats_url: str, database: Path, name: str) -> "subprocess.Popen[bytes]":
    """The example, as anybody runs it."""
    argv = [sys.executable, "-m", "examples.billing_consumer", "--nats", nats_url, "--database", str(database)]
    return subprocess.Popen([*argv, "--name", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def test_the_example_consumer_is_killed_again_and_again_and_owes_the_ledgers_sum(
    bus: NatsBus, nats_url: str, tmp_path: Path
) -> None:
    """400 rows, 40 of them corrections; kill -9 five times; the stream is lost once. Invoices = the ledger's totals."""
    chance = random.Random(11)
    ledger = await SqlLedger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    publisher = Publisher(ledger, JetStreamBilling(bus), ManualClock(), holder="test")
    gone = [f"r{n}" for n in range(40)]
    await ledger.append([candidate(abandoned(name)) for name in gone], now_ms=1)
    events = [usage_facts(f"r{n}", tenant_id="t1") for n in range(ROWS - 40)]
    for start in range(0, len(events), 60):
        await ledger.append([candidate(event) for event in events[start : start + 60]], now_ms=2)
        running = consumer(nats_url, tmp_path / "invoices.sqlite3", "killed")
        await publish_all(publisher, ledger)
        await asyncio.sleep(chance.uniform(0.3, 0.9))  # the point of the kill: it starts in about half a second
        running.kill()
        running.wait(60)
    await lose_stream(bus)
    assert await publisher.catch_up() == ROWS
    await publish_all(publisher, ledger)
    last = consumer(nats_url, tmp_path / "invoices.sqlite3", "last")  # a new stream knows no consumer of the old one
    invoices = Invoices(tmp_path / "invoices.sqlite3")
    owed = [("t1", "2026-01", "USD", str(AMOUNT * (ROWS - 40)))]

    def right() -> bool:
        return [(*row[:3], str(Decimal(row[3]).normalize())) for row in invoices.totals()] == [
            (*row[:3], str(Decimal(row[3]).normalize())) for row in owed
        ]

    try:
        await taken_by(bus, "last")
        assert right(), invoices.totals()
    finally:
        last.send_signal(signal.SIGTERM)
        assert last.wait(20) == 0
    await ledger.close()


async def test_records_say_what_they_take_back(bus: NatsBus, tmp_path: Path) -> None:
    """A gateway's event after a scheduler's: the record names the row, the period and the amount of the first."""
    ledger = await SqlLedger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    first, second = candidate(abandoned("r1")), candidate(usage_facts("r1"))
    await ledger.append([first], now_ms=1)
    await ledger.append([second], now_ms=2)
    rows = (await ledger.claim_unpublished("test", now_ms=0, lease_ms=1, limit=9)).rows
    billing = JetStreamBilling(bus)
    assert await billing.last_sequence() == 0
    assert await billing.publish(rows) == 2
    assert await billing.last_sequence() == 2
    message = await bus.jetstream.get_last_msg(subjects.BILLING_STREAM, subjects.billing("t1"))
    record = usage_pb2.RatedRecord.FromString(message.data or b"")
    assert (record.kind, record.period, record.reversal.sequence) == ("supersedes", "2026-01", 1)
    assert (record.reversal.period, Decimal(record.reversal.amount)) == ("2026-01", first.rating.amount)
    await ledger.close()

"""An example of a billing consumer that may be killed at any point and neither loses nor doubles a record.

    python -m examples.billing_consumer --nats nats://127.0.0.1:4222 --database invoices.sqlite3

How it stays right:

1. A durable pull consumer: the server remembers what was acknowledged, whoever runs.
2. The record and its effect on the invoice are written in one transaction; the record's `idempotency_key` is unique
   there, so a record that comes again has no effect. Only after the commit is it acknowledged.
3. Sums are kept a tenant, period and currency. A record adds its amount to its period; a correction also takes out of
   `reversal.period` what it takes back. Amounts are decimals, never floats.

Copy it; nothing of Roundhouse but the protobuf classes is needed.
"""

import argparse
import asyncio
import signal
import sqlite3
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import nats
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingCame
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from roundhouse.wire.v1 import usage_pb2

STREAM = "BILLING"
SUBJECTS = "rh.v1.billing.*"
BATCH = 200
WAIT_S = 1.0  # for the first record of a batch; also how soon a stop is noticed

TABLES = """
CREATE TABLE IF NOT EXISTS records (
    idempotency_key TEXT PRIMARY KEY, sequence INTEGER NOT NULL, tenant TEXT NOT NULL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invoices (
    tenant TEXT NOT NULL, period TEXT NOT NULL, currency TEXT NOT NULL, amount TEXT NOT NULL,
    PRIMARY KEY (tenant, period, currency)
) WITHOUT ROWID;
"""


class Invoices:
    """What is owed, in SQLite. One call at a time, from any thread; not for two processes at once."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")  # what is acknowledged must outlive a power cut
        self._database.executescript(TABLES)

    def take(self, records: Sequence[usage_pb2.RatedRecord]) -> int:
        """Book records, those that are new; how many were. One transaction: all of them or none."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            new = sum(self._take_one(record) for record in records)
            self._database.execute("COMMIT")
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        return new

    def _take_one(self, record: usage_pb2.RatedRecord) -> bool:
        tenant = record.event.subject
        values = (record.idempotency_key, record.sequence, tenant, record.SerializeToString())
        added = self._database.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", values)
        if not added.rowcount:
            return False
        self._add(tenant, record.period, record.currency, Decimal(record.amount))
        if record.HasField("reversal"):
            taken_back = record.reversal
            self._add(tenant, taken_back.period, taken_back.currency, -Decimal(taken_back.amount))
        return True

    def _add(self, tenant: str, period: str, currency: str, amount: Decimal) -> None:
        key = (tenant, period, currency)
        found = self._database.execute(
            "SELECT amount FROM invoices WHERE tenant = ? AND period = ? AND currency = ?", key
        ).fetchone()
        total = amount + (Decimal(found[0]) if found else Decimal(0))
        self._database.execute("INSERT OR REPLACE INTO invoices VALUES (?, ?, ?, ?)", (*key, format(total, "f")))

    def totals(self) -> list[tuple[str, str, str, str]]:
        """(tenant, period, currency, amount), sorted."""
        return list(self._database.execute("SELECT tenant, period, currency, amount FROM invoices ORDER BY 1, 2, 3"))


async def consume(nats_url: str, invoices: Invoices, name: str, stopping: asyncio.Event) -> None:
    """Take records until told to stop."""
    connection = await nats.connect(nats_url, max_reconnect_attempts=-1)
    try:
        jetstream = connection.jetstream()
        config = ConsumerConfig(
            durable_name=name,
            filter_subject=SUBJECTS,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=30,
            max_deliver=-1,
        )
        await jetstream.add_consumer(STREAM, config)
        subscription = await jetstream.pull_subscribe_bind(consumer=name, stream=STREAM)
        while not stopping.is_set():
            await take_batch(await fetched(subscription), invoices)
    finally:
        await connection.close()


async def fetched(subscription: object) -> list[Msg]:
    """What came within a second."""
    try:
        return list(await subscription.fetch(BATCH, timeout=WAIT_S))  # type: ignore[attr-defined]  # nats-py has no types
    except (TimeoutError, NothingCame):
        return []


async def take_batch(messages: Sequence[Msg], invoices: Invoices) -> None:
    """Book, then acknowledge."""
    if not messages:
        return
    records = [usage_pb2.RatedRecord.FromString(message.data) for message in messages]
    await asyncio.to_thread(invoices.take, records)
    for message in messages:
        await message.ack()


async def run(nats_url: str, database: Path, name: str) -> None:
    """Until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await consume(nats_url, Invoices(database), name, stopping)


def main() -> None:
    """Parse the command line and run, or print what is owed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="NATS server")
    parser.add_argument("--database", type=Path, default=Path("invoices.sqlite3"), help="SQLite file")
    parser.add_argument("--name", default="example-invoices", help="name of the durable consumer")
    parser.add_argument("--totals", action="store_true", help="print what is owed, and end")
    options = parser.parse_args()
    if options.totals:
        for row in Invoices(options.database).totals():
            print(*row, sep="\t")  # noqa: T201 - this is its output
        return
    asyncio.run(run(options.nats, options.database, options.name))


if __name__ == "__main__":
    main()

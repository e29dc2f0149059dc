"""Usage events a second from the stream into the committed ledger, against pulling and acknowledging without a ledger.

Every case drains the same number of messages from a NATS server of its own run, all waiting in the stream before the
clock starts. A share of the messages are repeats of earlier ones. The limit does what any consumer must (fetch in
batches of the same size, acknowledge each) and nothing else. With `--billing` the billing stream is published
meanwhile, as in the service; without it the ledger is measured alone. Beside each rate stands the processor time an
event took: on a machine that others use it says more.

`--queries N` fills a SQLite ledger with N rows (and a tenth and a hundredth of it) and measures queries on each.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg
import psycopg.sql
import uvloop
from nats.js.api import ConsumerConfig

from benchmarks.metering_events import CataloguePrices, facts_of
from benchmarks.metering_queries import query_latencies
from benchmarks.report import Figure, Goal, Report
from deploy.local.ports import free_ports
from deploy.local.server import LocalServer
from deploy.local.stores import nats_program, postgres_binaries, postgres_program
from roundhouse import subjects
from roundhouse.clock import SystemClock
from roundhouse.event_bus import NatsBus, connect_bus
from services.metering.adapters.billing_stream import JetStreamBilling
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_prices import SqlPrices
from services.metering.adapters.usage_stream import CONSUMER, JetStreamUsage
from services.metering.adapters.usage_wire import encode_event
from services.metering.domain.ledger import Result
from services.metering.operations.pricing import PriceKeeper
from services.metering.operations.publishing import Publisher
from services.metering.operations.recording import BATCH_EVENTS, Recorder

NAME = "metering"
DESCRIPTION = "usage events a second into the ledger, SQLite and PostgreSQL, with duplicates"

DUPLICATE_SHARES = (0.0, 0.1, 0.5)
GOALS = {"sqlite": 0.6, "postgresql": 0.4}
"""Share of the limit: what a ledger may cost beside the consumer itself."""

Drain = Callable[[NatsBus, int], Awaitable[float]]
"""Drain so many messages from the usage stream; the seconds it took."""


class _Count:
    """An `Observer` that tells when all events are recorded."""

    def __init__(self, events: int) -> None:
        self._left = events
        self.results: list[Result] = []
        self.done = asyncio.Event()

    def recorded(self, results: Sequence[Result], *, commit_ms: int) -> None:
        self.results += results
        self._left -= len(results)
        if self._left <= 0:
            self.done.set()

    def pending(self, events: int) -> None:
        return

    def unpublished(self, rows: int) -> None:
        return

    def condition(self, name: str, *, reason: str | None) -> None:
        return


def run(arguments: Sequence[str]) -> Report:
    """Measure each database with each share of duplicates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks metering")
    parser.add_argument("--events", type=int, default=20_000, help="messages a case")
    parser.add_argument("--repeats", type=int, default=3, help="runs a case; the median counts")
    parser.add_argument("--billing", action="store_true", help="publish the billing stream meanwhile")
    parser.add_argument("--queries", type=int, default=0, help="also measure queries, at this many rows")
    parser.add_argument("--no-postgresql", action="store_true", help="measure SQLite only")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rh-bench-")))
        folder.chmod(0o755)  # PostgreSQL runs as another user
        postgres = None if options.no_postgresql else stack.enter_context(_postgres(folder))
        nats_url = stack.enter_context(_nats(folder))
        return uvloop.run(_measure(options, folder, nats_url, postgres))


async def _measure(options: argparse.Namespace, folder: Path, nats_url: str, postgres: str | None) -> Report:
    bus = await connect_bus(nats_url, name="benchmark")
    costs: dict[str, list[float]] = {}
    figures: dict[str, Figure] = {"events": options.events}
    goals: list[Goal] = []
    databases = ["sqlite"] + (["postgresql"] if postgres else [])
    rates: dict[str, list[float]] = {}
    for turn in range(options.repeats):  # interleaved, so that a slow minute of the machine meets every case
        rates.setdefault("limit", []).append(
            await _rate(bus, options.events, 0.0, _pull_and_acknowledge, costs, "limit")
        )
        for database in databases:
            for share in DUPLICATE_SHARES:
                case = f"case_{turn}_{share * 100:.0f}"
                url = f"sqlite:///{folder}/{case}.sqlite3"
                if database == "postgresql":
                    url = await asyncio.to_thread(_new_database, str(postgres), case)
                drain = _into_ledger(url, billing=options.billing)
                name = f"{database}_{share:.0%}_duplicates_events_per_second"
                rates.setdefault(name, []).append(await _rate(bus, options.events, share, drain, costs, name))
    limit = statistics.median(rates.pop("limit"))
    for name, measured in rates.items():
        figures[name] = statistics.median(measured)
        goals.append(Goal.at_least(name, GOALS[name.split("_")[0]], statistics.median(measured) / limit))
    for name, measured in costs.items():
        figures[name.replace("_events_per_second", "") + "_cpu_us_per_event"] = round(statistics.median(measured), 1)
    await bus.close()
    if options.queries:
        figures |= await query_latencies(folder, options.queries)
    return Report(NAME, figures, {"pull_and_acknowledge_events_per_second": limit}, goals)


async def _rate(
    bus: NatsBus, events: int, share: float, drain: Drain, costs: dict[str, list[float]], name: str
) -> float:
    with suppress(Exception):
        await bus.jetstream.delete_stream(subjects.USAGE_STREAM)
    await bus.ensure_streams()
    await _publish(bus, _events(events, share, random.Random(5)))
    spent_s = time.process_time()
    took_s = await drain(bus, events)
    costs.setdefault(name, []).append((time.process_time() - spent_s) / events * 1e6)
    return events / took_s


async def _publish(bus: NatsBus, payloads: Iterator[tuple[str, bytes]]) -> None:
    window = []
    for subject, payload in payloads:
        window.append(await bus.jetstream.publish_async(subject, payload))
        if len(window) == BATCH_EVENTS:
            await asyncio.gather(*window)
            window.clear()
    await asyncio.gather(*window)


def _events(count: int, share: float, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """`count` messages of 50 tenants, a share of them repeats of one of the 5,000 before."""
    recent: list[tuple[str, bytes]] = []
    for number in range(count):
        if recent and chance.random() < share:
            yield recent[chance.randrange(len(recent))]
            continue
        facts = facts_of(number, chance)
        message = (subjects.usage(facts.tenant_id), encode_event(facts).SerializeToString())
        recent.append(message)
        del recent[:-5_000]
        yield message


async def _pull_and_acknowledge(bus: NatsBus, events: int) -> float:
    await bus.jetstream.add_consumer(subjects.USAGE_STREAM, ConsumerConfig(durable_name=CONSUMER, max_ack_pending=8192))
    subscription = await bus.jetstream.pull_subscribe_bind(consumer=CONSUMER, stream=subjects.USAGE_STREAM)
    started = time.perf_counter()
    while events > 0:
        messages = await subscription.fetch(BATCH_EVENTS, timeout=5)
        for message in messages:
            await message.ack()
        events -= len(messages)
    took = time.perf_counter() - started
    await subscription.unsubscribe()
    return took


def _into_ledger(url: str, *, billing: bool) -> Drain:
    async def drain(bus: NatsBus, events: int) -> float:
        ledger = await SqlLedger.open(url)
        clock, observer, stopping = SystemClock(), _Count(events), asyncio.Event()
        pricing = PriceKeeper(CataloguePrices(), SqlPrices(ledger.database), clock)
        recorder = Recorder(JetStreamUsage(bus), ledger, pricing, clock, observer)
        publisher = Publisher(ledger, JetStreamBilling(bus), clock, holder="benchmark")
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(recorder.run(stopping))
            if billing:
                tasks.create_task(publisher.run(stopping, recorder.appended))
            await observer.done.wait()
            took = time.perf_counter() - started
            stopping.set()
        assert Result.QUARANTINED not in observer.results, "every event of this benchmark is a good one"
        await ledger.close()
        return took

    return drain


def _new_database(server: str, name: str) -> str:
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
    return f"{server}/{name}"


@contextmanager
def _nats(folder: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    server = LocalServer(nats_program("nats", port, folder / "nats", folder / "nats.log"))
    server.start()
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.stop()


@contextmanager
def _postgres(folder: Path) -> Iterator[str | None]:
    """Address of a PostgreSQL of its own; None where none is installed."""
    if postgres_binaries() is None:
        yield None
        return
    (port,) = free_ports(1)
    server = LocalServer(postgres_program("postgres", port, folder / "postgres", folder / "postgres.log"))
    server.start()
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}"
    finally:
        server.stop()

"""Usage events a second from the stream into the committed ledger, against pulling and acknowledging without a ledger.

Every case drains the same number of messages from a NATS server of its own run, all waiting in the stream before the
clock starts. A share of the messages are repeats of earlier ones. The limit does what any consumer must (fetch in
batches of the same size, acknowledge each) and nothing else. With `--billing` the billing stream is published
meanwhile, as in the service; without it the ledger is measured alone.
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

from benchmarks.report import Figure, Goal, Report
from deploy.local.ports import free_ports
from deploy.local.server import LocalServer
from deploy.local.stores import nats_program, postgres_binaries, postgres_program
from roundhouse import subjects
from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model, Price
from roundhouse.clock import SystemClock
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.vocabulary import Digest, ModelName, Outcome, PriorityClass
from services.metering.adapters.billing_stream import JetStreamBilling
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_prices import SqlPrices
from services.metering.adapters.usage_stream import CONSUMER, JetStreamUsage
from services.metering.adapters.usage_wire import encode_event
from services.metering.domain.ledger import Result
from services.metering.domain.usage import UsageFacts
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


class _Prices:
    """One generation with one priced model."""

    def __init__(self) -> None:
        model = Model(
            name=ModelName("assistant-7b"),
            source_path="/models/assistant-7b",
            engine=Engine.REFERENCE,
            interface=Interface.LLM,
            digest=Digest("sha256:" + "1" * 64),
            price=Price(id="assistant-7b-2026", input="0.15", cached_input="0.05", output="0.6"),
        )
        self.current = Catalogue(generation=1, models={model.name: model})
        self.not_ready_reason: str | None = None


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
    figures: dict[str, Figure] = {"events": options.events}
    goals: list[Goal] = []
    databases = ["sqlite"] + (["postgresql"] if postgres else [])
    rates: dict[str, list[float]] = {}
    for turn in range(options.repeats):  # interleaved, so that a slow minute of the machine meets every case
        rates.setdefault("limit", []).append(await _rate(bus, options.events, 0.0, _pull_and_acknowledge))
        for database in databases:
            for share in DUPLICATE_SHARES:
                case = f"case_{turn}_{share * 100:.0f}"
                url = f"sqlite:///{folder}/{case}.sqlite3"
                if database == "postgresql":
                    url = await asyncio.to_thread(_new_database, str(postgres), case)
                drain = _into_ledger(url, billing=options.billing)
                name = f"{database}_{share:.0%}_duplicates_events_per_second"
                rates.setdefault(name, []).append(await _rate(bus, options.events, share, drain))
    limit = statistics.median(rates.pop("limit"))
    for name, measured in rates.items():
        figures[name] = statistics.median(measured)
        goals.append(Goal.at_least(name, GOALS[name.split("_")[0]], statistics.median(measured) / limit))
    await bus.close()
    return Report(NAME, figures, {"pull_and_acknowledge_events_per_second": limit}, goals)


async def _rate(bus: NatsBus, events: int, share: float, drain: Drain) -> float:
    with suppress(Exception):
        await bus.jetstream.delete_stream(subjects.USAGE_STREAM)
    await bus.ensure_streams()
    await _publish(bus, _events(events, share, random.Random(5)))
    return events / await drain(bus, events)


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
        facts = _facts(number, chance)
        message = (subjects.usage(facts.tenant_id), encode_event(facts).SerializeToString())
        recent.append(message)
        del recent[:-5_000]
        yield message


def _facts(number: int, chance: random.Random) -> UsageFacts:
    request_id = f"req-{chance.getrandbits(96):024x}"
    return UsageFacts(
        event_id=f"{request_id}/1",
        tenant_id=f"tenant-{number % 50}",
        source="roundhouse",
        time_ms=1_767_225_600_000 + number * 37,
        request_id=request_id,
        attempt=1,
        key_id=f"key-{number % 50}",
        model="assistant-7b",
        model_digest="sha256:" + "1" * 64,
        adapter=f"adapter-{number % 200}",
        adapter_digest="sha256:" + "2" * 64,
        priority_class=PriorityClass.STANDARD,
        outcome=Outcome.DONE,
        status=200,
        finish_reason="stop",
        input_tokens=chance.randrange(10, 4000),
        cached_tokens=chance.randrange(0, 10),
        output_tokens=chance.randrange(1, 800),
        counted_by="engine",
        queue_ms=12,
        stage_ms=0,
        load_ms=0,
        first_token_ms=180,
        total_ms=2400,
        run_ms=2300,
        node_id="node-1",
        operation="chat",
        emitter="gateway",
        corrects_id="",
    )


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
        pricing = PriceKeeper(_Prices(), SqlPrices(ledger.database), clock)
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

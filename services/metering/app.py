"""Composition root of metering: which adapter stands behind which port, and in what order they start and stop.

Start: servers, ledger (migrated), bus, catalogue, work. Stop: the batch at hand is committed and acknowledged, then
everything closes in reverse.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

import httpx
import structlog

from roundhouse import subjects
from roundhouse.audit_trail import BusAuditTrail
from roundhouse.catalogue.store import CatalogueReader
from roundhouse.clock import Clock, SystemClock
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.http_server import serve_http
from roundhouse.lifecycle import Application, Lifecycle
from roundhouse.ops_server import Readiness, serve_ops
from roundhouse.redis_edge import open_redis
from services.metering.adapters import metering_grpc
from services.metering.adapters.accounts_api import MoneyServices, accounts_router
from services.metering.adapters.billing_stream import JetStreamBilling
from services.metering.adapters.budget_alerts import StreamAlerts
from services.metering.adapters.budget_store import RedisBudgets
from services.metering.adapters.cloud_events import rated_record_json
from services.metering.adapters.costs_api import CostServices, costs_router
from services.metering.adapters.engine_metrics import TritonCounters
from services.metering.adapters.metering_grpc import MeteringService
from services.metering.adapters.observation import ProcessObserver
from services.metering.adapters.quarantine_api import quarantine_router
from services.metering.adapters.reconciling_api import reconciling_router
from services.metering.adapters.reconciling_sources import StreamSources
from services.metering.adapters.signing import PeriodSigner
from services.metering.adapters.sql_accounts import SqlAccounts
from services.metering.adapters.sql_entries import SqlEntries
from services.metering.adapters.sql_erasure import SqlForgetting
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_nodes import SqlNodeHours
from services.metering.adapters.sql_prices import SqlPrices
from services.metering.adapters.sql_rerating import SqlRerating
from services.metering.adapters.sql_spend import SqlSpend
from services.metering.adapters.sql_webhooks import SqlWebhooks
from services.metering.adapters.stream_erasure import JetStreamErasure
from services.metering.adapters.usage_api import usage_api
from services.metering.adapters.usage_stream import JetStreamUsage
from services.metering.adapters.webhook_http import HttpPoster
from services.metering.adapters.webhooks_api import WebhookServices, webhooks_router
from services.metering.operations.budgeting import TURN_MS as BUDGETS_MS
from services.metering.operations.budgeting import BudgetFeed
from services.metering.operations.costing import NOTE_EVERY_MS, NodeWatch
from services.metering.operations.engine_watch import SAMPLE_MS as ENGINES_MS
from services.metering.operations.engine_watch import EngineWatch
from services.metering.operations.folding import FOLD_EVERY_MS, Folding
from services.metering.operations.forgetting import RETENTION_EVERY_MS, Retention
from services.metering.operations.pricing import PriceKeeper
from services.metering.operations.publishing import LOOK_EVERY_MS, Publisher
from services.metering.operations.reconciling import LOOK_MS as RECONCILING_MS
from services.metering.operations.reconciling import Reconciler
from services.metering.operations.recording import Recorder
from services.metering.operations.watching import Watch
from services.metering.operations.webhooks import TURN_MS as WEBHOOKS_MS
from services.metering.operations.webhooks import WebhookSender, encode_with
from services.metering.ports import PriceSource
from services.metering.settings import MeteringSettings, rates_of

log = structlog.get_logger(__name__)

CONDITIONS_MS: Final = 250  # a lost bus shows in readiness before the next probe of any orchestrator
GRPC_GRACE_S: Final = 1.0  # a query takes milliseconds
GAUGES_MS: Final = 2_000  # well below the scrape interval of Prometheus


@dataclass(slots=True)
class Parts:
    """What tests may put in place of the real thing, and where they read the ports."""

    clock: Clock = field(default_factory=SystemClock)
    prices: PriceSource | None = None
    ops_port: int = 0
    http_port: int = 0
    grpc_port: int = 0


def application(settings: MeteringSettings, parts: Parts | None = None) -> Application:
    """The service. `parts` replaces the clock and the prices, and receives the bound ports."""
    using = parts or Parts()

    @asynccontextmanager
    async def running(lifecycle: Lifecycle) -> AsyncIterator[None]:
        readiness = Readiness("ledger", "recording", "nats", "usage_stream", "catalogue")
        async with AsyncExitStack() as stack:
            using.ops_port = await stack.enter_async_context(
                serve_ops(readiness, settings.bind_host, settings.ops_port)
            )
            ledger = await SqlLedger.open(settings.ledger_url)
            stack.push_async_callback(ledger.close)
            bus = await connect_bus(settings.nats_url, name=f"metering-{settings.instance_id}")
            stack.push_async_callback(bus.close)
            prices = using.prices or await _catalogue(settings, bus, lifecycle, stack)
            observer = ProcessObserver(readiness)
            stream = JetStreamUsage(bus)
            stack.push_async_callback(stream.close)
            pricing = PriceKeeper(prices, SqlPrices(ledger.database), using.clock)
            webhooks, sender = _webhooks(settings, ledger, using.clock, stack)
            lifecycle.every(WEBHOOKS_MS, sender.turn, "metering_webhooks")
            money = _money(settings, ledger, bus, pricing, using.clock)
            reconciler = await _reconciler(settings, ledger, bus, prices, observer, using.clock, stack)
            engines = await _engines(settings, ledger, observer, using.clock, stack)
            costs = await _costs(settings, ledger, bus, using.clock, lifecycle, stack)
            routers = (
                *(accounts_router(money), webhooks_router(webhooks), costs_router(costs)),
                reconciling_router(reconciler, engines, using.clock),
                quarantine_router(ledger, pricing, using.clock),
            )
            using.http_port = await stack.enter_async_context(
                serve_http(usage_api(ledger, *routers), settings.bind_host, settings.http_port)
            )
            using.grpc_port = await _serve_grpc(settings, MeteringService(ledger, money.accounts), stack)
            recorder = Recorder(stream, ledger, pricing, using.clock, observer)
            publisher = Publisher(ledger, JetStreamBilling(bus), using.clock, holder=settings.instance_id)
            bus.on_reconnected(publisher.doubt)
            watch = Watch(bus, stream, ledger, prices, observer)
            lifecycle.every(CONDITIONS_MS, watch.conditions, "metering_conditions")
            lifecycle.every(GAUGES_MS, watch.gauges, "metering_gauges")
            lifecycle.every(LOOK_EVERY_MS, publisher.look, "metering_billing_look")
            retention = Retention(money.forgetting, prices, using.clock)
            lifecycle.every(RETENTION_EVERY_MS, retention.turn, "metering_retention")
            lifecycle.every(FOLD_EVERY_MS, Folding(ledger).turn, "metering_folding")
            budgets = await _budgets(settings, ledger, bus, prices, using.clock, stack)
            lifecycle.every(BUDGETS_MS, budgets.turn, "metering_budgets")
            lifecycle.every(RECONCILING_MS, reconciler.turn, "metering_reconciling")
            lifecycle.every(ENGINES_MS, engines.turn, "metering_engines")
            await stack.enter_async_context(_working(lifecycle, recorder, publisher, settings.drain_seconds))
            log.info("metering_started", http_port=using.http_port, grpc_port=using.grpc_port)
            yield

    return running


@asynccontextmanager
async def _working(
    lifecycle: Lifecycle, recorder: Recorder, publisher: Publisher, drain_seconds: float
) -> AsyncIterator[None]:
    """Record and publish while open; leaving waits until the batch at hand is in the ledger and acknowledged."""
    stopping, finished = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(recorder.run(stopping), name="recorder")
                tasks.create_task(publisher.run(stopping, recorder.appended), name="publisher")
        finally:
            finished.set()

    lifecycle.spawn(work(), "metering")
    try:
        yield
    finally:
        stopping.set()
        recorder.appended.set()
        try:
            async with asyncio.timeout(drain_seconds):
                await finished.wait()
        except TimeoutError:
            log.warning("metering_not_drained", seconds=drain_seconds)  # unacknowledged events come again


async def _costs(
    settings: MeteringSettings,
    ledger: SqlLedger,
    bus: NatsBus,
    clock: Clock,
    lifecycle: Lifecycle,
    stack: AsyncExitStack,
) -> CostServices:
    hours = SqlNodeHours(ledger.database)
    watch = NodeWatch(hours)
    subscription = await bus.subscribe(subjects.NODE_STATES, watch.on_state)
    stack.push_async_callback(subscription.stop)
    lifecycle.every(NOTE_EVERY_MS, watch.turn, "metering_nodes")
    return CostServices(hours, rates_of(settings.node_hour_costs), settings.cost_currency, clock)


async def _serve_grpc(settings: MeteringSettings, service: MeteringService, stack: AsyncExitStack) -> int:
    server = GrpcServer()
    name = metering_grpc.add_to_server(service, server.server)
    port = await server.start(settings.bind_host, settings.grpc_port, [name])
    stack.push_async_callback(server.stop, GRPC_GRACE_S)
    return port


def _webhooks(
    settings: MeteringSettings, ledger: SqlLedger, clock: Clock, stack: AsyncExitStack
) -> tuple[WebhookServices, WebhookSender]:
    store = SqlWebhooks(ledger.database)
    poster = HttpPoster(allow_private=settings.webhook_private_addresses)
    stack.push_async_callback(poster.close)
    encode = encode_with(rated_record_json)
    sender = WebhookSender(store, poster, encode, clock, Random(), holder=settings.instance_id)  # noqa: S311 - jitter
    return WebhookServices(store, poster, clock), sender


def _money(
    settings: MeteringSettings, ledger: SqlLedger, bus: NatsBus, pricing: PriceKeeper, clock: Clock
) -> MoneyServices:
    signer = PeriodSigner(settings.signing_key_path())
    return MoneyServices(
        accounts=SqlAccounts(ledger.database, cluster=settings.cluster, sign=signer.sign),
        prices=SqlPrices(ledger.database),
        pricing=pricing,
        rerating=SqlRerating(ledger.database),
        entries=SqlEntries(ledger.database),
        forgetting=SqlForgetting(ledger.database),
        streams=JetStreamErasure(bus),
        ledger=ledger,
        clock=clock,
    )


async def _reconciler(
    settings: MeteringSettings,
    ledger: SqlLedger,
    bus: NatsBus,
    prices: PriceSource,
    observer: ProcessObserver,
    clock: Clock,
    stack: AsyncExitStack,
) -> Reconciler:
    redis = open_redis(settings.redis_url)
    stack.push_async_callback(redis.aclose)
    return Reconciler(ledger, StreamSources(redis, bus, prices), observer, clock)


async def _engines(
    settings: MeteringSettings, ledger: SqlLedger, observer: ProcessObserver, clock: Clock, stack: AsyncExitStack
) -> EngineWatch:
    client = await stack.enter_async_context(httpx.AsyncClient())
    counters = TritonCounters(client, settings.engine_metrics_urls.split())
    return EngineWatch(counters, ledger, observer, clock)


async def _budgets(
    settings: MeteringSettings,
    ledger: SqlLedger,
    bus: NatsBus,
    prices: PriceSource,
    clock: Clock,
    stack: AsyncExitStack,
) -> BudgetFeed:
    redis = open_redis(settings.redis_url)
    stack.push_async_callback(redis.aclose)
    alerts = StreamAlerts(bus, BusAuditTrail(bus, clock))
    return BudgetFeed(SqlSpend(ledger.database), RedisBudgets(redis), alerts, prices, clock)


async def _catalogue(
    settings: MeteringSettings, bus: NatsBus, lifecycle: Lifecycle, stack: AsyncExitStack
) -> PriceSource:
    redis = open_redis(settings.redis_url)
    stack.push_async_callback(redis.aclose)
    reader = CatalogueReader(redis, bus)
    await reader.start(lifecycle)
    return reader

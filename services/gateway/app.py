"""Composition root of the gateway: connects the parts, serves, and drains without losing a stream or a bill."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from roundhouse.catalogue.store import CatalogueReader, CatalogueView
from roundhouse.clock import Clock, SystemClock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus, connect_bus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.http_server import TlsFiles, serve_http
from roundhouse.lifecycle import Application, Lifecycle
from roundhouse.ops_server import Readiness, serve_ops
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import KeyId
from services.gateway.adapters import kserve_grpc, metering_grpc, native_grpc
from services.gateway.adapters.adapter_places import LoaderAdapters
from services.gateway.adapters.admin_api import admin_app
from services.gateway.adapters.admin_composition import AdminParts, open_admin
from services.gateway.adapters.admission import RedisAdmission
from services.gateway.adapters.answer_store import RedisAnswerStore
from services.gateway.adapters.batch_composition import Batches, BatchParts, open_batches
from services.gateway.adapters.grpc_requests import GrpcCalls
from services.gateway.adapters.http2_server import serve_http2
from services.gateway.adapters.http_app import health_routes, public_app
from services.gateway.adapters.http_limits import HttpLimits
from services.gateway.adapters.http_requests import RequestReader
from services.gateway.adapters.identity_tokens import IdentityTokens, Issuer, KeysAndTokens
from services.gateway.adapters.key_directory import RedisKeyDirectory
from services.gateway.adapters.kserve_grpc import KServeService
from services.gateway.adapters.kserve_rest import KServeRoutes
from services.gateway.adapters.kv_holds import KvStoreHolds
from services.gateway.adapters.metering_grpc import MeteringService
from services.gateway.adapters.model_signatures import NodeSignatures
from services.gateway.adapters.native_grpc import NativeService
from services.gateway.adapters.node_states import NodeStateFeed
from services.gateway.adapters.openai_calls import OpenAICalls
from services.gateway.adapters.openai_routes import OpenAIRoutes
from services.gateway.adapters.openai_work import OpenAIWork
from services.gateway.adapters.openapi_page import OpenApiPage
from services.gateway.adapters.outbox.folder import OutboxFolder
from services.gateway.adapters.request_metrics import PrometheusObserver
from services.gateway.adapters.scheduler_bus import BusScheduler, leave_emptied_nodes, receive_grants
from services.gateway.adapters.serving_versions import ServingVersions
from services.gateway.adapters.text_codecs import CheckpointCodecs
from services.gateway.adapters.triton_node import TritonNodes
from services.gateway.adapters.usage_outbox import UsageOutbox
from services.gateway.operations.adapter_placing import AdapterPlacing
from services.gateway.operations.admin_ports import NodeStates
from services.gateway.operations.apply import read_declared
from services.gateway.operations.attempts import Attempts
from services.gateway.operations.heartbeat import HEARTBEAT_MS, beat, renew
from services.gateway.operations.infer_tensors import TensorWork
from services.gateway.operations.run_request import RequestParts
from services.gateway.operations.settlements import Settlements
from services.gateway.ports import Admission, InferenceNode, KeyDirectory, TextCodecs
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

PROBE_MS = 1_000
APPLIED_AT_START = KeyId("start")  # who applied, in the audit stream, when it was the settings
OUTBOX_DRAIN_S = 5.0  # after the streams have ended; more would keep a supervisor waiting


@dataclass(slots=True)
class World:
    """The outside of a gateway. Tests put fakes here; what is None is connected from the settings."""

    bus: EventBus | None = None
    catalogue: CatalogueView | None = None
    keys: KeyDirectory | None = None
    admission: Admission | None = None
    node: InferenceNode | None = None
    codecs: TextCodecs = field(default_factory=CheckpointCodecs)
    clock: Clock = field(default_factory=SystemClock)


@dataclass(slots=True)
class Addresses:
    """Ports that were bound, for tests and embedding."""

    http: int = 0
    http2: int = 0
    grpc: int = 0
    admin: int = 0
    ops: int = 0
    routes: list[BaseRoute] = field(default_factory=list)  # of the public HTTP port; a test walks them all


def application(
    settings: GatewaySettings, world: World | None = None, addresses: Addresses | None = None
) -> Application:
    """The gateway as a `lifecycle` application. Entering raises Unavailable if a part cannot be reached."""

    @asynccontextmanager
    async def run(lifecycle: Lifecycle) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            gateway = Gateway(settings, world or World(), lifecycle, stack)
            await gateway.start(addresses or Addresses())
            yield

    return run


class Gateway:
    """One gateway process while it runs."""

    def __init__(self, settings: GatewaySettings, world: World, lifecycle: Lifecycle, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._tls = TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._world = world
        self._lifecycle = lifecycle
        self._stack = stack
        self._readiness = Readiness("nats", "redis", "catalogue", "usage_outbox", "serving")
        self._turns: list[asyncio.Lock] = []
        self._nodes = NodeStateFeed()
        self._parts_closing = False
        self._doors: list[AsyncExitStack] = []  # what takes work in; left together, each within the drain

    async def start(self, addresses: Addresses) -> None:
        """Connect, subscribe, serve. What is entered first is left last."""
        settings, world = self._settings, self._world
        addresses.ops = await self._stack.enter_async_context(
            serve_ops(self._readiness, settings.bind_host, settings.ops_port)
        )
        bus = await self._bus()
        redis = open_redis(settings.redis_url)
        self._stack.push_async_callback(redis.aclose)
        self._stack.push_async_callback(self._end_turns)
        declared = await self._catalogue(redis, bus)
        catalogue = ServingVersions(declared, world.clock)
        self._nodes.listen(catalogue.observe)
        await self._nodes.start(bus)
        self._stack.push_async_callback(self._nodes.stop)
        keys = await self._directory(redis)
        parts = await self._parts(bus, redis, catalogue)
        self._every(PROBE_MS, lambda: self._probe(bus, redis, catalogue), "readiness")
        reader = RequestReader(world.clock, body_bytes_max=settings.body_bytes_max, deadline_ms=settings.deadline_ms)
        texts = OpenAIWork(catalogue, world.codecs, settings.cluster)
        openai_calls = OpenAICalls(parts, texts)
        openai = OpenAIRoutes(openai_calls, catalogue, reader, world.clock, RedisAnswerStore(redis))
        nodes = await self._admin(bus, redis, declared, keys, addresses)
        signatures = NodeSignatures(nodes)
        tensors = TensorWork(catalogue, signatures)
        kserve = KServeRoutes(parts, tensors, signatures, catalogue, reader, self._readiness)
        calls = GrpcCalls(keys.identify, world.clock, settings.deadline_ms)
        metering = MeteringService(settings.metering_grpc, calls)
        self._stack.push_async_callback(metering.close)
        self._stack.push_async_callback(self._shut_doors)
        addresses.grpc = await self._serve_grpc(
            KServeService(parts, tensors, signatures, self._readiness, calls),
            NativeService(parts, texts, catalogue, calls),
            metering,
        )
        batches = await self._batches(bus, parts, catalogue, reader)
        page = OpenApiPage()
        addresses.routes = [*openai.routes(), *batches.routes, *kserve.routes(), *page.routes()]
        page.describe([*health_routes(self._readiness), *addresses.routes])
        await self._serve_http(public_app(addresses.routes, self._readiness, keys.identify), addresses)
        self._stack.callback(self._stop_taking_work)
        self._readiness.set("serving", reason=None)
        log.info("gateway_serving", http=addresses.http, ops=addresses.ops)

    async def _batches(
        self, bus: EventBus, parts: RequestParts, catalogue: CatalogueView, reader: RequestReader
    ) -> Batches:
        settings = self._settings
        given = BatchParts(
            bus=bus,
            parts=parts,
            catalogue=catalogue,
            codecs=self._world.codecs,
            reader=reader,
            lifecycle=self._lifecycle,
            workers=settings.batch_workers,
            file_bytes_max=settings.file_bytes_max,
            tenant_file_bytes_max=settings.tenant_file_bytes_max,
        )
        batches = await open_batches(given)
        self._door().push_async_callback(batches.workers.stop, settings.drain_seconds)
        return batches

    async def _bus(self) -> EventBus:
        if self._world.bus is not None:
            return self._world.bus
        bus = await connect_bus(self._settings.nats_url, name=f"gateway-{self._settings.instance_id}")
        self._stack.push_async_callback(bus.close)
        return bus

    async def _directory(self, redis: Redis) -> KeyDirectory:
        settings, world = self._settings, self._world
        keys = world.keys or RedisKeyDirectory(redis, world.clock, admin_key_hash=settings.admin_key_hash)
        if not settings.jwt_issuer:
            return keys
        client = await self._stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        return KeysAndTokens(keys, IdentityTokens(_issuer(settings), client, world.clock))

    async def _catalogue(self, redis: Redis, bus: EventBus) -> CatalogueView:
        if self._world.catalogue is not None:
            return self._world.catalogue
        reader = CatalogueReader(redis, bus)
        await reader.start(self._lifecycle)
        return reader

    async def _parts(self, bus: EventBus, redis: Redis, catalogue: CatalogueView) -> RequestParts:
        world, settings = self._world, self._settings
        admission = world.admission
        if admission is None:
            admission = limits = RedisAdmission(redis)
            self._stack.push_async_callback(limits.aclose)
        node = world.node
        if node is None:
            nodes, loaders = TritonNodes(), LoaderAdapters(world.clock)
            self._stack.push_async_callback(nodes.close)
            self._stack.push_async_callback(loaders.close)
            node = AdapterPlacing(nodes, loaders)
        holds = KvStoreHolds()
        self._stack.push_async_callback(holds.close)
        attempts = Attempts(settings.instance_id)
        settlements = Settlements(admission)
        scheduler = BusScheduler(bus, settings.instance_id, world.clock)
        outbox = await self._outbox(bus, scheduler)
        grants = await receive_grants(bus, settings.instance_id, attempts)
        self._stack.push_async_callback(grants.stop)
        leave_emptied_nodes(self._nodes, attempts)
        self._every(HEARTBEAT_MS, lambda: beat(attempts, scheduler, world.clock), "heartbeat")
        self._every(HEARTBEAT_MS, lambda: renew(attempts, admission, settlements), "lease_renewal")
        return RequestParts(
            cluster=settings.cluster,
            gateway_id=settings.instance_id,
            admission=admission,
            scheduler=scheduler,
            node=node,
            usage=outbox,
            attempts=attempts,
            settlements=settlements,
            holds=holds,
            observer=PrometheusObserver(),
            clock=world.clock,
            catalogue=catalogue,
        )

    async def _outbox(self, bus: EventBus, scheduler: BusScheduler) -> UsageOutbox:
        """The outbox, with what a killed gateway left; the scheduler hears that its attempts have ended."""
        settings, clock = self._settings, self._world.clock
        folder = OutboxFolder.open(Path(settings.outbox_dir), settings.instance_id)
        outbox = UsageOutbox(bus, events_max=settings.outbox_events_max, folder=folder)
        self._stack.callback(outbox.close)
        for finished in outbox.take_over(clock.now_ms()):
            await scheduler.finished(finished)
        outbox.start(self._lifecycle, clock)
        self._stack.push_async_callback(outbox.drain, OUTBOX_DRAIN_S)
        self._every(PROBE_MS, lambda: self._look_at(outbox), "usage_outbox_condition")
        return outbox

    async def _look_at(self, outbox: UsageOutbox) -> None:
        self._readiness.set("usage_outbox", reason=outbox.alarm)

    async def _admin(
        self, bus: EventBus, redis: Redis, catalogue: CatalogueView, keys: KeyDirectory, addresses: Addresses
    ) -> NodeStates:
        """Serve the admin API on its own port; apply the catalogue file, if one is set, before anything is served.

        Returns what is known of the nodes."""
        settings = self._settings
        parts = AdminParts(
            redis, bus, self._world.clock, catalogue, keys, settings.metering_url, settings.cluster, self._nodes
        )
        services = await self._stack.enter_async_context(open_admin(parts))
        if settings.catalogue_file:
            declared = await asyncio.to_thread(read_declared, Path(settings.catalogue_file))
            await services.applying.apply(declared, actor=APPLIED_AT_START)
        addresses.admin = await self._stack.enter_async_context(
            serve_http(
                HttpLimits(admin_app(services), secure=self._tls is not None),
                settings.bind_host,
                settings.admin_port,
                tls=self._tls,
                reuse_port=settings.reuse_port,
            )
        )
        return services.nodes

    async def _serve_http(self, app: ASGIApp, addresses: Addresses) -> None:
        """The public application over HTTP/1.1, and over HTTP/2 if it has a port."""
        settings, tls = self._settings, self._tls
        limited = HttpLimits(app, origins=settings.cors_origins, secure=tls is not None, body_s=settings.body_seconds)
        http1 = serve_http(
            limited,
            settings.bind_host,
            settings.http_port,
            drain_s=settings.drain_seconds,
            tls=tls,
            head_s=settings.head_seconds,
            reuse_port=settings.reuse_port,
        )
        addresses.http = await self._door().enter_async_context(http1)
        if settings.http2_port >= 0:
            http2 = serve_http2(
                limited,
                settings.bind_host,
                settings.http2_port,
                drain_s=settings.drain_seconds,
                tls=tls,
                reuse_port=settings.reuse_port,
            )
            addresses.http2 = await self._door().enter_async_context(http2)

    async def _serve_grpc(self, kserve: KServeService, native: NativeService, metering: MeteringService) -> int:
        server = GrpcServer(reuse_port=self._settings.reuse_port)
        names = [
            kserve_grpc.add_to_server(kserve, server.server),
            native_grpc.add_to_server(native, server.server),
            metering_grpc.add_to_server(metering, server.server),
        ]
        tls = None if self._tls is None else (self._tls.certificate, self._tls.key, self._tls.client_ca)
        port = await server.start(self._settings.bind_host, self._settings.grpc_port, names, tls=tls)
        self._door().push_async_callback(server.stop, self._settings.drain_seconds)
        return port

    async def _probe(self, bus: EventBus, redis: Redis, catalogue: CatalogueView) -> None:
        self._readiness.set("nats", reason=None if bus.connected else "NATS is not connected")
        reason = getattr(catalogue, "not_ready_reason", None)
        self._readiness.set("catalogue", reason=reason)
        if self._world.admission is not None:
            self._readiness.set("redis", reason=None)
            return
        try:
            await cast("Awaitable[bool]", redis.ping())
        except (RedisError, OSError, TimeoutError):
            self._readiness.set("redis", reason="Redis does not answer")
            raise Unavailable("Redis does not answer") from None
        self._readiness.set("redis", reason=None)

    def _every(self, interval_ms: int, turn: Callable[[], Awaitable[None]], name: str) -> None:
        """Periodic work that ends before the connections it uses are closed."""
        lock = asyncio.Lock()
        self._turns.append(lock)

        async def guarded() -> None:
            async with lock:
                if not self._parts_closing:
                    await turn()

        self._lifecycle.every(interval_ms, guarded, name)

    async def _end_turns(self) -> None:
        self._parts_closing = True
        for lock in self._turns:
            async with lock:
                pass  # the turn that was running has ended

    def _door(self) -> AsyncExitStack:
        """Where to put a server, or workers: what waits there for running work does so while the others wait too."""
        self._doors.append(AsyncExitStack())
        return self._doors[-1]

    async def _shut_doors(self) -> None:
        shut = await asyncio.gather(*(door.aclose() for door in self._doors), return_exceptions=True)
        for outcome in shut:
            if isinstance(outcome, BaseException):
                raise outcome

    def _stop_taking_work(self) -> None:
        self._readiness.set("serving", reason="draining")


def _issuer(settings: GatewaySettings) -> Issuer:
    return Issuer(
        name=settings.jwt_issuer,
        audience=settings.jwt_audience,
        key_set_url=settings.jwt_jwks_url,
        algorithms=settings.jwt_algorithms,
        tenant_claim=settings.jwt_tenant_claim,
        scope_claim=settings.jwt_scope_claim,
        scopes=settings.jwt_scopes,
        leeway_s=settings.jwt_leeway_seconds,
    )

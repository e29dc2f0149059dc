"""The admin API over fakes, and a client of it."""

from collections.abc import Mapping
from typing import Any

import httpx

from roundhouse.audit_trail import BusAuditTrail
from roundhouse.catalogue.assembly import FileReading
from roundhouse.catalogue.digests import DigestCache
from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model, Tenant
from roundhouse.errors import CapacityExhausted, Unavailable
from roundhouse.vocabulary import Digest, KeyId, ModelName, TenantId
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.gateway.adapters.admin_api import AdminServices, admin_app
from services.gateway.adapters.admin_caches import StreamedErasures
from services.gateway.adapters.admin_forecasts import BusForecasts
from services.gateway.adapters.admin_metering import MeteringProxy
from services.gateway.adapters.admin_nodes import HeardNodeStates
from services.gateway.domain.keys import key_hash
from services.gateway.operations.admin_maintenance import MaintenanceOperations
from services.gateway.operations.admin_models import ModelOperations
from services.gateway.operations.admin_ports import LoadCommand
from services.gateway.operations.apply import CatalogueApplication
from services.gateway.operations.erase_cache import CacheErasure, NodeErasure
from services.gateway.operations.erase_stored import StoredErasure
from services.gateway.operations.keys import KeyOperations, KeyWish
from tests.fakes.admission import InMemoryKeys
from tests.fakes.answer_store import InMemoryAnswerStore
from tests.fakes.catalogue import FixedCatalogue, InMemoryCatalogueStore
from tests.fakes.clock import ManualClock
from tests.fakes.event_bus import FakeBus

ROOT = "rh-admin-" + "b" * 43
ACME, GLOBEX = TenantId("acme"), TenantId("globex")
CHAT = Model(
    name=ModelName("chat"),
    source_path="/m",
    engine=Engine.REFERENCE,
    interface=Interface.LLM,
    digest=Digest("sha256:aa"),
)


class CountingLoader:
    """`NodeLoader` that remembers what it was told."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str, str]] = []
        self.refuses = False

    async def load(self, command: LoadCommand, *, timeout_ms: int) -> None:
        """See `NodeLoader.load`."""
        if self.refuses:
            raise CapacityExhausted("it does not fit now")
        kind = "load" if command.target == vocabulary_pb2.TIER_DEVICE else "stage"
        self.commands.append((kind, command.loader_address, command.version.digest))

    async def unload(self, command: LoadCommand, *, timeout_ms: int) -> bool:
        """See `NodeLoader.unload`."""
        self.commands.append(("unload", command.loader_address, command.version.digest))
        return True


class KeptMaintenance:
    """`NodeMaintenance` that remembers what it was told."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, ...]] = []

    async def drain(self, loader_address: str, reason: str) -> None:
        """See `NodeMaintenance.drain`."""
        self.commands.append(("drain", loader_address, reason))

    async def resume(self, loader_address: str) -> None:
        """See `NodeMaintenance.resume`."""
        self.commands.append(("resume", loader_address))


class EchoingUsage:
    """`UsageQueries` that answers with what it was asked."""

    async def usage(self, parameters: Mapping[str, str]) -> object:
        """See `UsageQueries.usage`."""
        return {"rows": [], "asked": dict(parameters)}


class TwoCaches:
    """`NodeCaches` of which the second one may be away."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.away = ""

    async def erase(self, address: str, salt: bytes, *, timeout_ms: int) -> NodeErasure:
        """See `NodeCaches.erase`."""
        if address == self.away:
            raise Unavailable("the kvstore did not erase it")
        self.asked.append((address, salt))
        return NodeErasure(blocks=3, blocks_left=0)


class World:
    """An admin API over fakes, and a client of it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bus = FakeBus()
        self.directory = InMemoryKeys(self.clock, admin_key_hash=key_hash(ROOT))
        self.loader = CountingLoader()
        self.store = InMemoryCatalogueStore()
        tenants = {name: Tenant(name=name) for name in (ACME, GLOBEX)}
        self.catalogue = FixedCatalogue(Catalogue(generation=3, tenants=tenants, models={CHAT.name: CHAT}))
        self.nodes = HeardNodeStates(self.clock)
        audit = BusAuditTrail(self.bus, self.clock)
        self.caches = TwoCaches()
        self.answers = InMemoryAnswerStore(self.clock)
        self.maintenance = KeptMaintenance()
        self.answers = InMemoryAnswerStore(self.clock)
        self._chance = 0
        self.keys = KeyOperations(self.directory, self.catalogue, audit, self.clock, self._bytes)
        services = AdminServices(
            directory=self.directory,
            catalogue=self.catalogue,
            applying=CatalogueApplication(self.store, self.catalogue, self.bus, audit, FileReading(DigestCache())),
            keys=self.keys,
            models=ModelOperations(self.catalogue, self.nodes, self.loader, audit),
            maintenance=MaintenanceOperations(self.nodes, self.maintenance, audit),
            forecasts=BusForecasts(self.bus),
            nodes=self.nodes,
            usage=EchoingUsage(),
            clock=self.clock,
            erasing=CacheErasure("cluster", self.nodes, self.caches, StreamedErasures(self.bus, self.clock), audit),
            stored=StoredErasure(self.answers, None, audit),
            metering=MeteringProxy(httpx.AsyncClient(base_url="http://metering")),  # sends nothing until it is called
        )
        transport = httpx.ASGITransport(admin_app(services))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1")

    def _bytes(self, count: int) -> bytes:
        self._chance += 1
        return self._chance.to_bytes(count, "big")

    async def call(self, method: str, path: str, key: str = ROOT, **options: Any) -> httpx.Response:
        """One call with a key."""
        return await self.client.request(method, path, headers={"authorization": f"Bearer {key}"}, **options)

    async def key_of(self, tenant: TenantId, *scopes: str) -> str:
        """A key of a tenant."""
        return (await self.keys.create(KeyWish(tenant, scopes), actor=KeyId("bootstrap"))).text

    async def say(self, node_id: str, *, state: str = "READY", free: int = 100, pool: str = "shared") -> None:
        """A node speaks; `state` "" = it does not have the model."""
        version = vocabulary_pb2.ModelVersion(model=CHAT.name, digest=CHAT.digest)
        number = vocabulary_pb2.InstanceState.Value(f"INSTANCE_STATE_{state or 'READY'}")
        instances = [loading_pb2.Instance(version=version, state=number)] if state else []
        tier = vocabulary_pb2.TierBytes(tier=vocabulary_pb2.TIER_DEVICE, capacity=free)
        message = loading_pb2.NodeState(
            node_id=node_id,
            pool=pool,
            accepting=True,
            loader_address=f"{node_id}:1",
            kvstore_address=f"{node_id}:2",
            instances=instances,
            tiers=[tier],
        )
        self.nodes.observe(message)

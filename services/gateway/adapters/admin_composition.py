"""Puts the admin API together from the parts that the gateway's composition root has anyway.

Kept out of `app` so that tests build the same thing over fakes or over a real store.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from redis.asyncio import Redis

from roundhouse.audit_trail import BusAuditTrail
from roundhouse.catalogue.assembly import FileReading
from roundhouse.catalogue.digests import DigestCache
from roundhouse.catalogue.store import CatalogueStore, CatalogueView
from roundhouse.clock import Clock
from roundhouse.event_bus import EventBus
from services.gateway.adapters.admin_api import AdminServices
from services.gateway.adapters.admin_caches import GrpcNodeCaches, StreamedErasures
from services.gateway.adapters.admin_forecasts import BusForecasts
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.admin_metering import MeteringProxy
from services.gateway.adapters.admin_nodes import GrpcNodeLoader, GrpcNodeMaintenance, HeardNodeStates
from services.gateway.adapters.admin_usage import HttpUsageQueries
from services.gateway.adapters.answer_store import RedisAnswerStore
from services.gateway.adapters.batch_composition import batch_operations
from services.gateway.adapters.node_states import NodeStateFeed
from services.gateway.operations.admin_maintenance import MaintenanceOperations
from services.gateway.operations.admin_models import ModelOperations
from services.gateway.operations.apply import CatalogueApplication
from services.gateway.operations.erase_cache import CacheErasure
from services.gateway.operations.erase_stored import StoredErasure
from services.gateway.operations.keys import KeyOperations
from services.gateway.ports import KeyDirectory


@dataclass(frozen=True, slots=True)
class AdminParts:
    """What there must be before there can be an admin API. `metering_url` is metering's query API."""

    redis: Redis
    bus: EventBus
    clock: Clock
    catalogue: CatalogueView
    directory: KeyDirectory
    metering_url: str
    cluster: str
    nodes: NodeStateFeed
    reading: FileReading | None = None  # None: files are read with the sizes of `roundhouse.catalogue.sizes`


@asynccontextmanager
async def open_admin(parts: AdminParts) -> AsyncIterator[AdminServices]:
    """What `admin_app` needs, while the context is open. Raises Unavailable."""
    audit = BusAuditTrail(parts.bus, parts.clock)
    nodes = HeardNodeStates(parts.clock)
    parts.nodes.listen(nodes.observe)
    store = CatalogueStore(parts.redis)
    reading = parts.reading or FileReading(DigestCache())
    async with httpx.AsyncClient(base_url=parts.metering_url, trust_env=False) as metering:
        yield AdminServices(
            directory=parts.directory,
            catalogue=parts.catalogue,
            applying=CatalogueApplication(store, parts.catalogue, parts.bus, audit, reading),
            keys=KeyOperations(RedisKeyRegistry(parts.redis), parts.catalogue, audit, parts.clock, secrets.token_bytes),
            models=ModelOperations(parts.catalogue, nodes, GrpcNodeLoader(), audit),
            maintenance=MaintenanceOperations(nodes, GrpcNodeMaintenance(), audit),
            forecasts=BusForecasts(parts.bus),
            nodes=nodes,
            usage=HttpUsageQueries(metering),
            metering=MeteringProxy(metering),
            clock=parts.clock,
            erasing=CacheErasure(
                parts.cluster, nodes, GrpcNodeCaches(), StreamedErasures(parts.bus, parts.clock), audit
            ),
            stored=StoredErasure(RedisAnswerStore(parts.redis), await batch_operations(parts.bus, parts.clock), audit),
        )

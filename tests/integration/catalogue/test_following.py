"""The catalogue over real NATS and Valkey: applied here, read there, and kept through restarts of both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from roundhouse.catalogue import store
from roundhouse.catalogue.store import CATALOGUE_KEY, CatalogueReader
from roundhouse.clock import SystemClock
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.lifecycle import Lifecycle
from roundhouse.redis_edge import open_redis
from services.gateway.adapters.admin_api import admin_app
from services.gateway.adapters.admin_composition import AdminParts, open_admin
from services.gateway.adapters.key_directory import RedisKeyDirectory
from services.gateway.adapters.node_states import NodeStateFeed
from services.gateway.domain.keys import key_hash
from tests.infra import FaultyServer
from tests.unit.catalogue.files import GOOD, write_models

ROOT = "rh-admin-" + "b" * 43


@asynccontextmanager
async def reader_on(redis_url: str, bus: NatsBus) -> AsyncIterator[CatalogueReader]:
    """A started reader, as any service has one."""
    redis = open_redis(redis_url)
    async with asyncio.TaskGroup() as tasks:
        lifecycle = Lifecycle(tasks)
        reader = CatalogueReader(redis, bus)
        await reader.start(lifecycle)
        yield reader
        lifecycle.cancel_tasks()
    await redis.aclose()


@asynccontextmanager
async def admin_on(redis_url: str, bus: NatsBus, catalogue: CatalogueReader) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real admin API."""
    redis, clock = open_redis(redis_url), SystemClock()
    directory = RedisKeyDirectory(redis, clock, admin_key_hash=key_hash(ROOT))
    parts = AdminParts(redis, bus, clock, catalogue, directory, "http://127.0.0.1:1", "cluster", NodeStateFeed())
    async with open_admin(parts) as services:
        transport = httpx.ASGITransport(admin_app(services))
        headers = {"authorization": f"Bearer {ROOT}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://a/admin/v1", headers=headers) as client:
            yield client
    await redis.aclose()


async def until(condition: Callable[[], bool], *, within_s: float) -> None:
    """Wait for something that other processes bring about."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the store, which tells nobody
            await asyncio.sleep(0.02)


@pytest.mark.timeout(60)
async def test_a_declaration_reaches_every_reader_and_a_broken_one_nobody(
    redis_url: str, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B44: through the real store and bus: applied, refused with its place and nothing changed, applied again."""
    monkeypatch.setattr(store, "POLL_MS", 600_000)  # so that it comes by the bus
    bus = await connect_bus(nats_url, name="test")
    body = {"text": GOOD, "file_name": "c.yaml", "base_dir": str(write_models(tmp_path))}
    async with (
        reader_on(redis_url, bus) as near,
        reader_on(redis_url, bus) as far,
        admin_on(redis_url, bus, near) as api,
    ):
        assert (await api.post("/catalogue", json=body)).json()["generation"] == 1
        assert near.current.generation == 1  # at once where it was applied
        await until(lambda: far.current.generation == 1, within_s=30)
        wrong = await api.post("/catalogue", json={**body, "text": GOOD.replace("weight: 2", "wieght: 2")})
        assert (wrong.status_code, wrong.json()["problems"][0]["line"]) == (400, 4)
        assert (await api.post("/catalogue", json=body)).json()["unchanged"] is True
        better = await api.post("/catalogue", json={**body, "text": GOOD.replace("weight: 2", "weight: 3")})
        assert better.json()["generation"] == 2
        await until(lambda: far.current.tenants["acme"].weight == 3, within_s=30)  # type: ignore[index]
    await bus.close()


@pytest.mark.timeout(60)
async def test_the_catalogue_is_followed_without_the_bus(
    redis_url: str, nats_server: FaultyServer, tmp_path: Path
) -> None:
    """Invariant 18: with NATS killed a change still takes effect within the poll's second, and a key still ends."""
    bus = await connect_bus(nats_server.url, name="test")
    body = {"text": GOOD, "file_name": "c.yaml", "base_dir": str(write_models(tmp_path))}
    async with (
        reader_on(redis_url, bus) as near,
        reader_on(redis_url, bus) as far,
        admin_on(redis_url, bus, near) as api,
    ):
        nats_server.kill()
        assert (await api.post("/catalogue", json=body)).json()["generation"] == 1
        await until(lambda: far.current.generation == 1, within_s=30)
        made = (await api.post("/keys", json={"tenant": "acme"})).json()
        ended = await api.delete(f"/keys/{made['key_id']}")
        assert ended.json()["state"] == "revoked"
    await bus.close()


@pytest.mark.timeout(60)
async def test_a_store_that_lost_its_memory_gets_the_catalogue_back(
    valkey_server: FaultyServer, nats_url: str, tmp_path: Path
) -> None:
    """Invariant 18: killed: still served; back and empty: put back by a reader within seconds."""
    bus = await connect_bus(nats_url, name="test")
    body = {"text": GOOD, "file_name": "c.yaml", "base_dir": str(write_models(tmp_path))}
    url = valkey_server.url
    async with reader_on(url, bus) as reader, admin_on(url, bus, reader) as api:
        assert (await api.post("/catalogue", json=body)).json()["generation"] == 1
        valkey_server.kill()
        await asyncio.sleep(1.2)  # one poll that fails
        assert (reader.current.generation, reader.not_ready_reason) == (1, None)
        valkey_server.restart()
        redis = open_redis(url)
        await redis.flushall()
        async with asyncio.timeout(60):
            while not await redis.exists(CATALOGUE_KEY):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        await redis.aclose()
        assert reader.current.generation == 1
    await bus.close()

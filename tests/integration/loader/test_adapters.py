"""Adapters on a real loader and a real Triton: a thousand over one base, kill -9 of either, one that does not fit."""

import asyncio
import shutil
from pathlib import Path

import grpc
import msgspec
import pytest

from roundhouse.catalogue.digests import FileEntry, digest_of_entries, version_entries
from roundhouse.catalogue.records import Adapter, Catalogue, ContentFile, Engine, Model, Tenant
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import AdapterName, ModelName, TenantId
from roundhouse.wire.v1 import loading_pb2
from services.loader.domain.versions import ModelVersion, triton_model_name
from tests.builders.checkpoints import random_adapter, random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer
from tests.integration.loader.loader_process import LoaderProcess, is_ready, model_record

DECLARED = 1_100
WITHIN_S = 90
BASE_BYTES = 8 * 2**20
ACME, GLOBEX = TenantId("acme"), TenantId("globex")


def adapter_record(name: str, folder: Path) -> Adapter:
    """A catalogue record of what lies in `folder` now, owned by acme."""
    entries = version_entries(folder)
    return Adapter(
        name=AdapterName(name),
        base=ModelName("base"),
        source_path=str(folder),
        digest=digest_of_entries(entries),
        files=tuple(ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in entries),
        tenant=ACME,
    )


def imagined(number: int, like: Adapter) -> Adapter:
    """A record whose source is not there: one of the many that nobody asks for in this test."""
    files = tuple(msgspec.structs.replace(file, sha256=f"{number:064x}") for file in like.files)
    digest = digest_of_entries(FileEntry(file.name, file.size, bytes.fromhex(file.sha256)) for file in files)
    return msgspec.structs.replace(
        like, name=AdapterName(f"far-{number}"), source_path=f"/nowhere/{number}", digest=digest, files=files
    )


async def put(redis_url: str, base: Model, adapters: list[Adapter], generation: int = 1) -> None:
    """Make this the catalogue."""
    redis = open_redis(redis_url)
    try:
        catalogue = Catalogue(
            generation=generation,
            tenants={name: Tenant(name=name) for name in (ACME, GLOBEX)},
            models={base.name: base},
            adapters={adapter.name: adapter for adapter in adapters},
        )
        await CatalogueStore(redis).put(catalogue, expected_generation=generation - 1)
    finally:
        await redis.aclose()


class World:
    """A base on a node, and what a gateway and an engine would do with its adapters."""

    def __init__(self, loader: LoaderProcess, triton: TritonServer, base: Model) -> None:
        self.loader = loader
        self.base = base
        self.name = triton_model_name(ModelVersion(base.name, base.digest))
        self._engine = EngineServer(triton.grpc_address, triton.log)

    async def ensure(self, adapter: Adapter, tenant: TenantId = ACME) -> loading_pb2.EnsureAdapterReply:
        """EnsureAdapter."""
        request = loading_pb2.EnsureAdapterRequest(
            adapter=adapter.name,
            digest=adapter.digest,
            tenant_id=tenant,
            triton_model_name=self.name,
            deadline_ms=30_000,
        )
        return await self.loader.stub.EnsureAdapter(request, timeout=40)

    async def ask(self, adapter: Adapter | None) -> str:
        """Greedy tokens of the base, or with an adapter that the loader was asked for."""
        details = None
        if adapter is not None:
            place = await self.ensure(adapter)
            details = {"adapter": {"path": place.path, "digest": adapter.digest}}
        answer = await asyncio.to_thread(
            self._engine.ask, self.name, "the same prompt", details=details, max_tokens=12, temperature=0
        )
        assert answer.error is None, answer.error
        return answer.text


def make_base(root: Path) -> Model:
    """A small Llama."""
    return model_record("base", random_checkpoint(root / "base"), device_bytes=100, engine=Engine.REFERENCE)


@pytest.mark.timeout(240)
async def test_a_thousand_adapters_and_kills(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """1,100 are declared over one base. Those asked for answer each in its own way; the node holds no more than fits.

    After kill -9 of the loader, and of Triton, they answer as before, without their sources: from disk and memory."""
    base = make_base(tmp_path)
    real = [adapter_record(f"a{n}", random_adapter(tmp_path / f"a{n}", tmp_path / "base", n)) for n in range(24)]
    many = [*real, *(imagined(number, real[0]) for number in range(DECLARED - len(real)))]
    await put(redis_url, base, many)
    each = sum(file.size for file in real[0].files)
    loader.extra = {"DISK_BYTES": str(BASE_BYTES + 24 * each), "ADAPTER_HOST_BYTES": str(8 * each)}
    async with loader:
        world = World(loader, triton, base)
        await loader.load(base)
        await asyncio.gather(*(world.ensure(adapter) for adapter in real))
        texts = [await world.ask(adapter) for adapter in (None, *real[:6])]
        assert len(set(texts)) == 7
        state = await loader.wait_for(lambda now: now.adapters.on_disk >= 24, within_s=WITHIN_S)
        assert state.adapters.host_resident <= state.adapters.host_capacity == 8 * each
        assert state.adapters.in_host == 8
        for adapter in real:
            shutil.rmtree(adapter.source_path)
        await loader.kill()
        await loader.start()
        await loader.wait_for(lambda now: is_ready(now, base), within_s=WITHIN_S)
        assert [await world.ask(adapter) for adapter in (None, *real[:6])] == texts
        triton.kill()
        await loader.wait_for(lambda now: not now.accepting, within_s=WITHIN_S)
        triton.start()
        await loader.wait_for(lambda now: now.accepting, within_s=WITHIN_S)
        await loader.load(base, reason="operator")
        assert [await world.ask(adapter) for adapter in (None, *real[:6])] == texts
        state = await loader.state()
        assert (state.adapters.on_disk, state.adapters.in_host) == (24, 8)


@pytest.mark.timeout(240)
async def test_what_does_not_fit_or_is_not_theirs(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """Another hidden size is refused with the tensor at fault, for operators too; another tenant finds nothing."""
    base = make_base(tmp_path)
    other = random_checkpoint(tmp_path / "other", hidden_size=64)
    good = adapter_record("good", random_adapter(tmp_path / "good", tmp_path / "base"))
    wrong = adapter_record("wrong", random_adapter(tmp_path / "wrong", other))
    await put(redis_url, base, [good, wrong])
    async with loader:
        world = World(loader, triton, base)
        await loader.load(base)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.ensure(wrong)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "mlp.down_proj lora_B is [64, 4], not [32, 4]" in (refused.value.details() or "")
        (told,) = (await loader.state()).adapters.refused
        assert (told.adapter, told.base, told.reason) == ("wrong", "base", refused.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as hidden:
            await world.ensure(good, GLOBEX)
        assert hidden.value.code() is grpc.StatusCode.NOT_FOUND
        await world.ensure(good)

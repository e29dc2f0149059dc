"""vLLM behind a real Triton with its real vLLM backend, on vLLM's CPU build: our package, loader, gateway's calls and
adapters. `make test-vllm` runs it where that backend's sources are (`triton_with_vllm`).

Not run here: any GPU, and that backend as NVIDIA builds it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import pytest

from engines.packaging import EngineSpec
from roundhouse.block_keys import tenant_salt
from roundhouse.catalogue.records import Adapter, Engine, Model
from roundhouse.clock import SystemClock
from roundhouse.errors import EngineFailed, InvalidInput
from roundhouse.vocabulary import RequestId
from roundhouse.wire.v1 import loading_pb2
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.adapter_places import LoaderAdapters
from services.gateway.adapters.triton_node import TritonNodes
from services.gateway.domain.sampling import Sampling, with_adapter
from services.gateway.operations.adapter_placing import AdapterPlacing
from services.gateway.ports import EngineChunk, EngineRequest
from services.loader.domain.versions import ModelVersion, triton_model_name
from tests.builders.checkpoints import random_adapter, random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer
from tests.integration.kvstore.kvstore_process import KvStoreProcess
from tests.integration.loader.loader_process import LoaderProcess, is_ready, model_record, version_of
from tests.integration.loader.test_adapters import ACME, GLOBEX, adapter_record, put
from tests.integration.vllm.triton_with_vllm import MARKS, children, triton_with_vllm

pytestmark = MARKS

LOAD_S = 400  # vLLM's imports in two processes; most of a minute on a quiet machine of two cores
SLOTS, ADAPTERS = 2, 12  # 2 in device slots, 8 in the engine's memory: the others come back from the node's
TOKENS = 12
SAMPLING = Sampling(temperature=0, ignore_eos=True)
PROMPT = "the same prompt, which is longer than one block of thirty-two tokens"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The module's Triton, with vLLM."""
    with triton_with_vllm(tmp_path_factory.mktemp("triton")) as server:
        yield server


def whole_characters(text: str) -> str:
    """Without what is left of a character that the limit cut: engines differ in whether they show that."""
    return text.rstrip("\ufffd")


class World:
    """A vLLM base on a node, and what a gateway does with its adapters."""

    def __init__(self, loader: LoaderProcess, triton: TritonServer, base: Model, kvstore: KvStoreProcess) -> None:
        self.loader, self.triton, self.base, self.kvstore = loader, triton, base, kvstore
        self.name = triton_model_name(ModelVersion(base.name, base.digest))
        self.nodes, self.places = TritonNodes(), LoaderAdapters(SystemClock())
        self.placement = Placement(
            node_id="n1",
            triton_grpc_address=triton.grpc_address,
            triton_model_name=self.name,
            loader_address=f"127.0.0.1:{loader.ports[0]}",
        )

    async def load(self) -> None:
        """Have the base ready; it takes most of a minute."""
        order = loading_pb2.EnsureLoadedRequest(
            version=version_of(self.base), deadline_ms=LOAD_S * 1_000, reason="operator"
        )
        async for _ in self.loader.stub.EnsureLoaded(order, timeout=LOAD_S):
            pass
        await self.loader.wait_for(lambda now: is_ready(now, self.base), within_s=LOAD_S)

    def request(self, adapter: Adapter | None, sampling: Sampling = SAMPLING) -> EngineRequest:
        """As a gateway makes it."""
        extra = {"salt": tenant_salt("c", "acme").hex()} | ({"adapter_digest": adapter.digest} if adapter else {})
        return EngineRequest(
            request_id=RequestId("r"),
            text_input=PROMPT,
            prompt_token_ids=(),
            sampling_parameters=sampling.engine_parameters(0, TOKENS, extra),
            phase="full",
            stream=True,
            salt=extra["salt"],
            adapter_path="",
            adapter_digest=adapter.digest if adapter else "",
            adapter_name=adapter.name if adapter else "",
            tenant_id=ACME,
            return_logprobs=sampling.logprobs is not None,
        )

    async def chunks(self, adapter: Adapter | None, sampling: Sampling = SAMPLING) -> list[EngineChunk]:
        """What a gateway gets."""
        node = AdapterPlacing(self.nodes, self.places)
        answer = node.generate(self.placement, self.request(adapter, sampling), timeout_ms=60_000)
        return [chunk async for chunk in answer]

    async def text(self, adapter: Adapter | None) -> str:
        """The whole answer, whose account is right: a token count that adds up, one end, at the end."""
        chunks = await self.chunks(adapter)
        assert sum(chunk.output_tokens for chunk in chunks) == TOKENS
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert chunks[-1].finish_reason == "length"
        assert {chunk.input_tokens for chunk in chunks} == {len(PROMPT.encode())}
        return whole_characters("".join(chunk.text for chunk in chunks))

    async def close(self) -> None:
        """End the connections."""
        await self.nodes.close()
        await self.places.close()


@pytest.fixture
async def world(
    triton: TritonServer, nats_url: str, redis_url: str, tmp_path: Path, kvstore: KvStoreProcess
) -> AsyncIterator[World]:
    """A loader whose catalogue has a vLLM base with room for two adapters, and a kvstore. Nothing is loaded."""
    folder = random_checkpoint(tmp_path / "base", 1, hidden_size=128, intermediate_size=96)
    record = model_record("base", folder, device_bytes=100, engine=Engine.VLLM)
    base = msgspec.structs.replace(record, adapter_slots=SLOTS)
    loader = LoaderProcess(triton, nats_url, redis_url, tmp_path / "cache")
    loader.extra = {"LOAD_TIMEOUT_SECONDS": str(LOAD_S), "KVSTORE_ADDRESS": kvstore.address}
    world = World(loader, triton, base, kvstore)
    yield world
    await world.close()
    await loader.kill()


def many_adapters(world: World, root: Path) -> list[Adapter]:
    """Twelve, all different."""
    base = Path(world.base.source_path)
    return [adapter_record(f"a{n}", random_adapter(root / f"a{n}", base, n)) for n in range(ADAPTERS)]


def by_the_reference_engine(world: World, adapters: list[Adapter]) -> list[str]:
    """What the base says, and with each adapter, computed by our own engine on the same Triton."""
    engine = EngineServer(world.triton.grpc_address, world.triton.log)
    engine.load(EngineSpec("reference", "oracle", world.base.source_path, kv_pool_tokens=1_024))
    try:
        said = []
        for adapter in (None, *adapters):
            details = None if adapter is None else {"adapter": {"path": adapter.source_path, "digest": adapter.digest}}
            answer = engine.ask("oracle", PROMPT, details=details, max_tokens=TOKENS, temperature=0, ignore_eos=True)
            assert answer.error is None, answer.error
            said.append(whole_characters(answer.text))
        return said
    finally:
        engine.unload("oracle")


async def test_adapters_over_vllm_from_declaration_to_answer(world: World, redis_url: str, tmp_path: Path) -> None:
    """Twelve adapters over a base with two device slots: each answers as our own engine computes it, four at once, and
    again after it left the engine's memory. One that has no room or is another tenant's is refused before the engine,
    which goes on. Nothing changes when the loader is killed and the sources are gone. When vLLM's engine is killed, or
    Triton, the base comes back by itself, with new names, and the old ones name nothing."""
    adapters = many_adapters(world, tmp_path)
    base = Path(world.base.source_path)
    wide = adapter_record("wide", random_adapter(tmp_path / "wide", base, rank=32))
    await put(redis_url, world.base, [*adapters, wide])
    expected = await asyncio.to_thread(by_the_reference_engine, world, adapters)
    assert len(set(expected)) == 1 + ADAPTERS
    async with world.loader as loader:
        await world.load()
        assert [await world.text(adapter) for adapter in (None, *adapters)] == expected
        assert await asyncio.gather(*map(world.text, adapters[:4])) == expected[1:5]
        await check_logprobs(world, adapters[0])
        assert world.kvstore.statistics().blocks >= 2 * (1 + ADAPTERS)  # two of 32 tokens for the base and each adapter
        with pytest.raises(InvalidInput, match=r"r must be in \[1, 16\], not 32"):
            await world.text(wide)
        stranger = loading_pb2.EnsureAdapterRequest(
            adapter="a0", digest=adapters[0].digest, tenant_id=GLOBEX, triton_model_name=world.name
        )
        with pytest.raises(grpc.aio.AioRpcError) as hidden:
            await loader.stub.EnsureAdapter(stranger, timeout=30)
        assert hidden.value.code() is grpc.StatusCode.NOT_FOUND
        old = await world.places.find(world.placement, world.request(adapters[0]), timeout_ms=60_000)
        assert old.engine_name.endswith("-0")

        await loader.kill()
        for adapter in adapters:
            shutil.rmtree(adapter.source_path)
        await loader.start()
        await loader.wait_for(lambda now: is_ready(now, world.base), within_s=90)
        await world.close()
        world.nodes, world.places = TritonNodes(), LoaderAdapters(SystemClock())
        assert [await world.text(adapter) for adapter in (None, *adapters)] == expected
        assert await world.places.find(world.placement, world.request(adapters[0]), timeout_ms=60_000) == old

        await end_the_engine(world)
        assert await again(world, adapters[0]) == expected[1]
        new = await world.places.find(world.placement, world.request(adapters[0]), timeout_ms=60_000)
        assert new.engine_name != old.engine_name
        stale = world.request(adapters[0])
        stale = replace(stale, sampling_parameters=with_adapter(stale.sampling_parameters, old.engine_name))
        with pytest.raises(EngineFailed):
            await anext(world.nodes.generate(world.placement, stale, timeout_ms=60_000))

        world.triton.kill()
        await loader.wait_for(lambda now: not now.accepting, within_s=90)
        world.triton.start()
        assert await again(world, adapters[3]) == expected[4]
        assert [await world.text(adapter) for adapter in (None, *adapters[:3])] == expected[:4]


async def check_logprobs(world: World, adapter: Adapter) -> None:
    """One entry a token; greedy, so each is the likeliest of the two that were asked for."""
    chunks = await world.chunks(adapter, replace(SAMPLING, logprobs=2))
    entries = [entry for chunk in chunks if chunk.logprobs for entry in json.loads(chunk.logprobs)]
    assert len(entries) == TOKENS
    for entry in entries:
        likeliest, second = entry["top"]
        assert likeliest["id"] == entry["id"] != second["id"]
        assert entry["logprob"] <= 0


async def end_the_engine(world: World) -> None:
    """Kill -9 of the process in which vLLM computes; Triton's own process for the model stays."""
    child = world.triton.server.child
    assert child is not None
    (engine,) = children(child.pid, lambda command: "EngineCore" in command)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(EngineFailed):
        await asyncio.gather(*(world.chunks(None) for _ in range(3)))


async def again(world: World, adapter: Adapter) -> str:
    """The answer, once the base is back by itself."""
    async with asyncio.timeout(LOAD_S):
        while True:
            try:
                return await world.text(adapter)
            except Exception:  # noqa: BLE001 - whatever a gateway would try again
                await asyncio.sleep(1)

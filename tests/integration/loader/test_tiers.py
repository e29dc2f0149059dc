"""The tiers with the real engine: a warm load reads from shared memory, and the answers are the same."""

import asyncio
from pathlib import Path

from roundhouse.catalogue.digests import version_entries
from roundhouse.catalogue.records import ContentFile, Engine, Model
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from tests.builders.checkpoints import random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer
from tests.integration.loader.loader_process import (
    READY,
    LoaderProcess,
    device,
    instance,
    model_record,
    put_catalogue,
    tier,
    version_of,
)


def listed(model: Model, folder: Path) -> Model:
    """The record with its files, as `apply` makes it."""
    from msgspec.structs import replace

    files = tuple(ContentFile(name=e.name, size=e.size, sha256=e.sha256.hex()) for e in version_entries(folder))
    return replace(model, files=files)


async def stage(loader: LoaderProcess, model: Model, target: "vocabulary_pb2.Tier.ValueType") -> list[int]:
    """Stage only; the states that were told."""
    request = loading_pb2.EnsureLoadedRequest(version=version_of(model), target=target, reason="prewarm")
    return [progress.state async for progress in loader.stub.EnsureLoaded(request, timeout=60)]


async def test_a_prewarmed_model_loads_from_shared_memory_and_answers_alike(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """Staged to the host tier, loaded from there, unloaded (its host copy stays), the loader killed, loaded again from
    what the next process took over; without an arena the same text comes from the disk."""
    folder = random_checkpoint(tmp_path / "m")
    model = listed(model_record("m", folder, device_bytes=0, engine=Engine.REFERENCE), folder)
    await put_catalogue(redis_url, [model])
    served = EngineServer(triton.grpc_address, triton.log)
    answers: list[str] = []

    async def load_and_ask() -> None:
        loaded = (await loader.load(model, reason="operator"))[-1]
        assert loaded.state == READY
        answer = await asyncio.to_thread(
            served.ask, loaded.instance.triton_model_name, "hello", max_tokens=6, temperature=0
        )
        assert answer.error is None
        answers.append(answer.text)

    loader.extra = {"DEVICE_BYTES": str(2**30)}
    async with loader:
        assert (await stage(loader, model, vocabulary_pb2.TIER_DISK))[-1] == vocabulary_pb2.INSTANCE_STATE_STAGED
        assert tier_of(await loader.state(), model) == vocabulary_pb2.TIER_DISK
        assert (await stage(loader, model, vocabulary_pb2.TIER_HOST))[-1] == vocabulary_pb2.INSTANCE_STATE_STAGED
        assert tier_of(await loader.state(), model) == vocabulary_pb2.TIER_HOST
        await load_and_ask()
        state = await loader.state()
        measured = instance(state, model)
        assert measured is not None
        assert measured.device_bytes == measured.measured_bytes == device(state)[0] > 0
        held = tier(state, vocabulary_pb2.TIER_HOST).resident
        await loader.unload(model)
        assert tier_of(await loader.state(), model) == vocabulary_pb2.TIER_HOST
        await loader.kill()
        await loader.start()
        state = await loader.state()
        assert tier(state, vocabulary_pb2.TIER_HOST).resident == held > 0
        await load_and_ask()
        await loader.unload(model)
        assert await loader.terminate() == 0
        loader.extra = {**loader.extra, "HOST_BYTES": "0"}
        await loader.start()
        await load_and_ask()
        assert tier(await loader.state(), vocabulary_pb2.TIER_HOST).capacity == 0
        await loader.unload(model)
    served.client.close()
    assert len(set(answers)) == 1
    assert len(answers) == 3


def tier_of(state: loading_pb2.NodeState, model: Model) -> int:
    """The fastest tier that has the model's weights."""
    found = instance(state, model)
    assert found is not None
    return found.tier

"""Orders to a real loader over a real Triton: one load for many callers, the newest order wins, room and failures."""

import asyncio
from pathlib import Path

import grpc
import pytest

from roundhouse.catalogue.records import Engine, Model
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from tests.builders.checkpoints import knob_model, random_checkpoint, turn_knobs
from tests.infra import TritonServer
from tests.integration.loader.loader_process import (
    READY,
    LoaderProcess,
    count_loads,
    device,
    instance,
    loads_counted,
    model_record,
    put_catalogue,
    tier,
    version_of,
)


def is_ready(state: loading_pb2.NodeState, model: Model) -> bool:
    """Whether the node says that the model's version is ready."""
    found = instance(state, model)
    return found is not None and found.state == READY


async def test_eight_callers_of_a_cold_model_share_one_load(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """B17, invariant 7: eight parallel EnsureLoaded all succeed, the backend loads once, the ledger grows once."""
    marker = tmp_path / "loads"
    model = model_record("m", count_loads(knob_model(tmp_path / "m", load_ms=300), marker), device_bytes=100)
    await put_catalogue(redis_url, [model])
    async with loader:
        answers = await asyncio.gather(*(loader.load(model, 1) for _ in range(8)))
        assert [answer[-1].state for answer in answers] == [READY] * 8
        assert all(len(answer) > 1 for answer in answers), "every caller got progress"
        assert loads_counted(marker) == 1
        assert device(await loader.state()) == (100, 0)


async def test_a_load_followed_by_an_unload_ends_not_ready(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """B17: sent back to back, the newer order wins; the older caller is told so."""
    model = model_record("m", knob_model(tmp_path / "m", load_ms=300))
    await put_catalogue(redis_url, [model])
    async with loader:
        loading = asyncio.create_task(loader.load(model, 1))
        await loader.wait_for(lambda state: instance(state, model) is not None, within_s=30)
        assert await loader.unload(model, 2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await loading
        assert refused.value.code() is grpc.StatusCode.ABORTED
        state = await loader.state()
        assert not is_ready(state, model)
        assert device(state) == (0, 0)


async def test_an_unload_followed_by_a_load_ends_ready(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """B17: the load that meets an unload in progress waits for it (invariant 9) and then loads again."""
    marker = tmp_path / "loads"
    model = model_record("m", count_loads(knob_model(tmp_path / "m"), marker))
    await put_catalogue(redis_url, [model])
    async with loader:
        await loader.load(model, 1)
        unloading = asyncio.create_task(loader.unload(model, 2))
        await loader.wait_for(
            lambda state: state.instances[0].state == vocabulary_pb2.INSTANCE_STATE_UNLOADING, within_s=30
        )
        answer = await loader.load(model, 3)
        assert answer[-1].state == READY
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unloading
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert device(await loader.state()) == (100, 0)
        assert loads_counted(marker) == 2


async def test_an_older_generation_is_refused(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """Generation 4 after generation 5 is ABORTED; generation 5 again is answered without a second load."""
    marker = tmp_path / "loads"
    model = model_record("m", count_loads(knob_model(tmp_path / "m"), marker))
    await put_catalogue(redis_url, [model])
    async with loader:
        await loader.load(model, 5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await loader.unload(model, 4)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert (await loader.load(model, 5))[-1].state == READY
        assert loads_counted(marker) == 1


async def test_failed_loads_leave_nothing_behind_and_a_mended_model_loads(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """B18, invariant 6: weights cut to 0 bytes fail twice with the cause; a good model loads; mended, it loads too."""
    bad = model_record("bad", random_checkpoint(tmp_path / "bad"), engine=Engine.REFERENCE)
    good = model_record("good", knob_model(tmp_path / "good"))
    weights = tmp_path / "bad" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"")
    await put_catalogue(redis_url, [bad, good])
    async with loader:
        before = await loader.state()
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await loader.load(bad, reason="operator")
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "other content than the catalogue" in str(failed.value.details())
        after = await loader.state()
        assert after.tiers == before.tiers
        found = instance(after, bad)
        assert found is not None
        assert found.state == vocabulary_pb2.INSTANCE_STATE_FAILED
        assert "other content" in found.reason
        assert found.retry_at_unix_ms > after.sent_unix_ms
        assert (await loader.load(good))[-1].state == READY
        weights.write_bytes(whole)
        assert (await loader.load(bad, reason="operator"))[-1].state == READY
        assert after.accepting


async def test_a_load_that_triton_refuses_tells_the_cause_and_frees_its_bytes(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """B18: the engine's own words reach the caller; within the pause the same answer comes at once."""
    folder = knob_model(tmp_path / "m", fail_load="the tensor is upside down")
    broken = model_record("m", folder)
    turn_knobs(folder, fail_load=None)
    await put_catalogue(redis_url, [broken])
    async with loader:
        turn_knobs(folder, fail_load="the tensor is upside down")
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await loader.load(broken)
            assert "upside down" in str(failed.value.details())
        state = await loader.state()
        assert device(state) == (0, 0)
        assert tier(state, vocabulary_pb2.TIER_DISK).reserved == 0


async def test_a_broken_new_version_leaves_the_old_one_serving(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """B19: versions have different names in Triton, so the failed load of version 2 does not touch version 1."""
    folder = knob_model(tmp_path / "m")
    first = model_record("m", folder)
    await put_catalogue(redis_url, [first])
    async with loader:
        await loader.load(first)
        turn_knobs(folder, fail_load="bad version")
        second = model_record("m", folder)
        await put_catalogue(redis_url, [second], generation=2)
        await asyncio.sleep(1.2)  # the catalogue is polled each second
        with pytest.raises(grpc.aio.AioRpcError):
            await loader.load(second)
        state = await loader.state()
        assert is_ready(state, first)
        assert device(state) == (100, 0)


async def test_what_can_never_fit_is_refused_at_once(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """B22: capacity 400, three of 100 loaded; 500 is refused, nothing is staged, nobody is evicted.

    Then 350 fits only if enough may leave: 400 - 300 = 100 free, 250 missing, so all three idle ones must go."""
    small = [model_record(f"s{n}", knob_model(tmp_path / f"s{n}", tokens=n + 1)) for n in range(3)]
    giant = model_record("giant", knob_model(tmp_path / "giant", tokens=50), device_bytes=500)
    large = model_record("large", knob_model(tmp_path / "large", tokens=60), device_bytes=350)
    await put_catalogue(redis_url, [*small, giant, large])
    async with loader:
        for model in small:
            await loader.load(model)
        before = await loader.state()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await loader.load(giant, first=small)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await loader.load(large, first=small[:2])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        after = await loader.state()
        assert after.tiers == before.tiers
        assert [entry.state_since_unix_ms for entry in after.instances] == [
            entry.state_since_unix_ms for entry in before.instances
        ]
        assert (await loader.load(large, first=small))[-1].state == READY
        assert device(await loader.state()) == (350, 0)


async def test_only_as_many_leave_as_are_needed(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """B22: 400 - 3 × 100 = 100 free; a model of 150 needs one to leave, and it is the first that was offered."""
    small = [model_record(f"s{n}", knob_model(tmp_path / f"s{n}", tokens=n + 1)) for n in range(3)]
    wide = model_record("wide", knob_model(tmp_path / "wide", tokens=70), device_bytes=150)
    await put_catalogue(redis_url, [*small, wide])
    async with loader:
        for model in small:
            await loader.load(model)
        await loader.load(wide, first=[small[1], small[0], small[2]])
        state = await loader.state()
        assert [is_ready(state, model) for model in (*small, wide)] == [True, False, True, True]
        assert device(state) == (350, 0)


async def test_an_unknown_version_is_not_found(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """A digest that the catalogue does not have is NOT_FOUND, and leaves no trace."""
    model = model_record("m", knob_model(tmp_path / "m"))
    await put_catalogue(redis_url, [model])
    async with loader:
        request = loading_pb2.EnsureLoadedRequest(version=version_of(model))
        request.version.digest = "sha256:" + "0" * 64
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in loader.stub.EnsureLoaded(request):
                pass
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert list((await loader.state()).instances) == []


async def test_a_reference_model_of_a_million_parameters_loads(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """Weights in the arena, an engine process of its own, READY with what Triton took."""
    folder = random_checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=384, layers=5)
    model = model_record("m", folder, engine=Engine.REFERENCE)
    await put_catalogue(redis_url, [model])
    async with loader:
        answer = await loader.load(model)
        assert answer[-1].state == READY
        assert answer[-1].instance.load_ms > 0

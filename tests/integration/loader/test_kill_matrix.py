"""kill -9 of the loader and of Triton at each state of a version's life, on real Triton.

Afterwards the version loads again, the account is exact, nothing is left in the cache's `incoming` but what can be gone
on with, and Triton has one process for it. A few of the pairs run by default; `ROUNDHOUSE_TEST_KILLS=all` runs all.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from roundhouse.catalogue.records import Model
from roundhouse.environment import kill_tests_wanted
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.loader.adapters.model_processes import StubProcesses
from services.loader.domain.versions import ModelVersion, triton_model_name
from tests.builders.checkpoints import knob_model
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer, Stream
from tests.integration.loader.loader_process import (
    LoaderProcess,
    device,
    instance,
    is_ready,
    model_record,
    put_catalogue,
)

STATES = ("staging", "loading", "ready", "draining", "unloading", "failed")
SAMPLE = [("loader", "loading"), ("triton", "unloading")]
ALL = [(victim, state) for victim in ("loader", "triton") for state in STATES]
CASES = ALL if kill_tests_wanted() == "all" else SAMPLE
WITHIN_S = 60
WEIGHTS_BYTES = 400 * 2**20  # so that its staging is met; only for that state

_WORDS = {state: vocabulary_pb2.InstanceState.Value(f"INSTANCE_STATE_{state.upper()}") for state in STATES}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("victim", "state"), CASES)
async def test_after_a_kill_at_any_state_everything_is_as_ordered(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer, victim: str, state: str
) -> None:
    """Invariants 6, 7 and 10, case B18: the orders are given again afterwards, as a scheduler does, and all is well."""
    model = make_model(tmp_path, state)
    await put_catalogue(redis_url, [model])
    async with loader:
        stream = await bring_to(loader, model, state, triton)
        if victim == "loader":
            await loader.kill()
            await loader.start()
        else:
            triton.kill()
            triton.start()  # from the main thread: the child lives as long as the thread that started it
            await loader.wait_for(lambda now: now.accepting, within_s=WITHIN_S)
        if stream is not None:
            with suppress(Exception):
                stream.cancel()
        (tmp_path / "broken").unlink(missing_ok=True)  # the model of "failed" is mended
        await ordered_again(loader, model)
        now = await loader.wait_for(lambda now: is_ready(now, model), within_s=WITHIN_S)
        assert device(now) == (100, 0)
        found = instance(now, model)
        assert found is not None
        pids = await StubProcesses(triton.ports.grpc).find(found.triton_model_name)
        assert pids is not None
        assert len(pids) == 1
        assert list((loader.cache / "incoming").iterdir()) == []
        await loader.unload(model)
        now = await loader.state()
        assert device(now) == (0, 0)
        assert not list(triton.model_repository.iterdir())


def make_model(root: Path, state: str) -> Model:
    """A model that stays in the state long enough to be met there."""
    load_ms = 2_000 if state == "loading" else 0
    folder = knob_model(root / "m", tokens=2_000, token_interval_ms=20, load_ms=load_ms)
    if state == "staging":
        with (folder / "weights.bin").open("wb") as weights:
            for _ in range(WEIGHTS_BYTES // 2**20):
                weights.write(os.urandom(2**20))
    if state == "failed":
        (root / "broken").touch()
        with (folder / "1" / "model.py").open("a") as source:
            source.write(
                f"""

def _checked(self, args, _initialize=TritonPythonModel.initialize):
    import os
    if os.path.exists({str(root / "broken")!r}):
        raise RuntimeError("told to fail")
    _initialize(self, args)


TritonPythonModel.initialize = _checked
"""
            )
    return model_record("m", folder)


async def bring_to(loader: LoaderProcess, model: Model, state: str, triton: TritonServer) -> Stream | None:
    """Give orders until the version is in that state; the stream that holds up an unload, if one has to."""
    orders = [asyncio.create_task(quietly(loader, model))]
    stream = None
    if state in ("draining", "unloading"):
        await orders[0]
        name = triton_model_name(ModelVersion(model.name, model.digest))
        stream = EngineServer(triton.grpc_address, triton.log).open(name, "hello", max_tokens=2_000)
        await asyncio.to_thread(stream.next)
        orders.append(asyncio.create_task(quietly(loader, model, unload=True)))
    await loader.wait_for(lambda now: stands_at(now, model, state), within_s=WITHIN_S)
    for order in orders:
        order.cancel()
    await asyncio.gather(*orders, return_exceptions=True)
    return stream


def stands_at(now: loading_pb2.NodeState, model: Model, state: str) -> bool:
    """Whether the node says that the version is there; what follows at once counts too, it may be seen first."""
    found = instance(now, model)
    passed = {"draining": ("unloading",)}.get(state, ())
    return found is not None and found.state in {_WORDS[each] for each in (state, *passed)}


async def quietly(loader: LoaderProcess, model: Model, *, unload: bool = False) -> None:
    """An order whose answer nobody needs."""
    with suppress(grpc.aio.AioRpcError):
        await (loader.unload(model) if unload else loader.load(model))


async def ordered_again(loader: LoaderProcess, model: Model) -> None:
    """Ask for it until it is ready, as a scheduler with waiting requests does."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await loader.load(model, reason="operator")
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.3)
            else:
                return

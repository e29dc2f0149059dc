"""Declared devices on a real Triton: a gang is held to its devices, found there again, and a leak ends Triton."""

import asyncio
import json
from pathlib import Path

import grpc
import httpx
import pytest
from msgspec.structs import replace

from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import events_pb2, loading_pb2
from services.loader.adapters.model_processes import StubProcesses
from services.loader.adapters.process_table import ProcessTable
from tests.builders.checkpoints import knob_model
from tests.infra import TritonServer, wait_until
from tests.integration.loader.loader_process import (
    READY,
    LoaderProcess,
    device,
    is_ready,
    model_record,
    put_catalogue,
)

DEVICES = [
    {"bytes": 100, "uuid": f"GPU-{index}", "cuda": f"GPU-{index}", "link_group": index // 2} for index in range(4)
]
LEFT_BEHIND = 48 * 2**20
LEAK_BYTES = 2 * LEFT_BEHIND  # reached by the third load


def sites(state: loading_pb2.NodeState) -> dict[str, tuple[int, ...]]:
    """What stands on which devices."""
    return {each.version.model: tuple(each.devices) for each in state.instances if each.devices}


async def test_a_gang_is_held_to_its_devices_and_found_there(
    triton: TritonServer, loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """Its process sees two GPUs, by their UUIDs; devices, states and accounts are told, and a killed loader's next
    process finds all of it again. What can never stand there is refused with the reason."""
    gang = replace(model_record("gang", knob_model(tmp_path / "gang"), device_bytes=120), tensor_parallel=2)
    single = model_record("single", knob_model(tmp_path / "single", tokens=9), device_bytes=60)
    wide = replace(model_record("wide", knob_model(tmp_path / "wide", tokens=8)), tensor_parallel=3)
    await put_catalogue(redis_url, [gang, single, wide])
    loader.extra = {"DEVICES": json.dumps(DEVICES), "DEVICE_BYTES": "0"}
    async with loader:
        assert (await loader.load(gang, devices=[2, 3]))[-1].instance.devices == [2, 3]
        await loader.load(single)
        await loader.kill()
        await loader.start()
        state = await loader.wait_for(lambda state: is_ready(state, gang) and is_ready(state, single), within_s=30)
        assert sites(state) == {"gang": (2, 3), "single": (0,)}
        assert [(each.uuid, each.link_group, each.resident) for each in state.devices] == [
            ("GPU-0", 0, 60),
            ("GPU-1", 0, 0),
            ("GPU-2", 1, 60),
            ("GPU-3", 1, 60),
        ]
        assert device(state) == (180, 0)
        assert await visible_gpus(triton, state, "gang") == "GPU-2,GPU-3"
        assert await visible_gpus(triton, state, "single") == "GPU-0"
        with pytest.raises(grpc.aio.AioRpcError, match="3 linked devices") as refused:
            await loader.load(wide)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await loader.unload(gang)
        await loader.unload(single)


def remembered(loader: LoaderProcess) -> str:
    """What the loader keeps for the next one, if it wrote it."""
    path = loader.cache / "node.json"
    return path.read_text() if path.exists() else ""


async def visible_gpus(triton: TritonServer, state: loading_pb2.NodeState, model: str) -> str:
    """What the environment of a model's process says."""
    name = next(each.triton_model_name for each in state.instances if each.version.model == model)
    pids = await StubProcesses(triton.ports.grpc).find(name)
    assert pids is not None
    (pid,) = pids
    environment = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
    pairs = dict(pair.split("=", 1) for pair in environment.decode().split("\0") if "=" in pair)
    return pairs["CUDA_VISIBLE_DEVICES"]


async def test_a_measured_size_outlives_the_loader(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """Undeclared, a model is reckoned by its files (kilobytes) until its process was measured (megabytes); a killed
    loader's next process adopts it with that size."""
    model = model_record("m", knob_model(tmp_path / "m"), device_bytes=0)
    await put_catalogue(redis_url, [model])
    loader.extra = {"DEVICE_BYTES": str(2**30)}
    async with loader:
        await loader.load(model)
        state = await loader.wait_for(lambda state: device(state)[0] > 2**20, within_s=30)
        measured = device(state)
        async with asyncio.timeout(30):
            while str(measured[0]) not in remembered(loader):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.1)
        await loader.kill()
        await loader.start()
        state = await loader.wait_for(lambda state: is_ready(state, model), within_s=30)
        assert device(state) == measured
        await loader.unload(model)


@pytest.mark.timeout(240)
async def test_a_triton_whose_engine_leaves_memory_behind_is_started_anew(
    triton: TritonServer, loader: LoaderProcess, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Each load leaves a process with 48 MiB behind. After the third, of 96 MiB that are allowed, it is told; once
    nothing is loaded, Triton and what was left are ended; the next Triton (here the test is its supervisor) serves."""
    model = model_record("m", leave_a_process_behind(knob_model(tmp_path / "m")))
    await put_catalogue(redis_url, [model])
    loader.extra = {"LEAK_BYTES": str(LEAK_BYTES)}
    async with loader:
        assert triton.server.child is not None
        first = triton.server.child.pid
        await first_look(loader)
        for _ in range(3):
            await loader.load(model)
            await loader.unload(model)
        await loader.wait_for(lambda state: not state.accepting, within_s=60)
        await asyncio.to_thread(wait_until, lambda: "it runs" if triton.server.alive else None, within_s=30)
        await asyncio.to_thread(
            wait_until, lambda: "some run" if ProcessTable.read().group(first) else None, within_s=30
        )
        triton.start()
        await loader.wait_for(lambda state: state.accepting, within_s=30)
        assert (await loader.load(model))[-1].state == READY
        await loader.unload(model)
    assert [what for what in await audited(nats_url) if what in ("leak", "recycled")] == ["leak", "recycled"]
    triton.restart()


async def first_look(loader: LoaderProcess) -> None:
    """Until the loader has seen an empty Triton: its metric is there."""
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        url = f"http://127.0.0.1:{loader.ports[1]}/metrics"
        while 'unaccounted_bytes{where="server"}' not in (await client.get(url)).text:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.2)


async def audited(nats_url: str) -> list[str]:
    """The kinds of every audit event so far."""
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        subscription = await bus.jetstream.pull_subscribe("rh.v1.audit.>", stream="AUDIT")
        return [events_pb2.AuditEvent.FromString(m.data).what for m in await subscription.fetch(50, timeout=2)]
    finally:
        await bus.close()


def leave_a_process_behind(folder: Path) -> Path:
    """Make a knob model start a process at each load that holds memory and outlives it; it ends by itself."""
    with (folder / "1" / "model.py").open("a") as source:
        source.write(
            f"""

def _leaving(self, args, _initialize=TritonPythonModel.initialize):
    import os, time
    if os.fork() == 0:
        held = os.urandom(4096) * ({LEFT_BEHIND} // 4096)
        time.sleep(240)
        os._exit(0)
    _initialize(self, args)


TritonPythonModel.initialize = _leaving
"""
        )
    return folder

"""What goes wrong around a loader: Triton killed, hung or restarted, the loader killed, NATS emptied."""

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from nats.aio.client import Client
from nats.js.errors import Error as JetStreamError

from roundhouse.catalogue.records import Model
from roundhouse.event_bus import NatsBus
from roundhouse.subjects import NODES_BUCKET
from roundhouse.wire.v1 import events_pb2, loading_pb2, vocabulary_pb2
from services.loader.adapters.triton_control import TritonControl
from services.loader.domain.versions import ModelVersion, triton_model_name
from services.loader.ports import TritonState
from tests.builders.checkpoints import knob_model
from tests.infra import FaultyServer, ProgramServer, TritonServer
from tests.integration.loader.loader_process import (
    READY,
    LoaderProcess,
    count_loads,
    device,
    instance,
    is_ready,
    loads_counted,
    model_record,
    put_catalogue,
    tier,
)


async def test_what_a_restarted_triton_lost_comes_back_by_itself(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """Invariant 6: after kill -9 and a restart what was wanted is loaded again without an order, the rest is not."""
    model = model_record("m", knob_model(tmp_path / "m"))
    other = model_record("other", knob_model(tmp_path / "other", tokens=2))
    await put_catalogue(redis_url, [model, other])
    async with loader:
        await loader.load(model)
        await loader.load(other)
        await loader.unload(other)
        triton.kill()
        state = await loader.wait_for(lambda state: not state.accepting, within_s=30)
        assert "Triton" in state.unhealthy_reason
        triton.start()  # from the main thread: the child lives as long as the thread that started it
        state = await loader.wait_for(lambda state: state.accepting and is_ready(state, model), within_s=30)
        assert device(state) == (100, 0)
        left = instance(state, other)
        assert left is not None
        assert left.state == vocabulary_pb2.INSTANCE_STATE_STAGED
        answer = await TritonControl(triton.grpc_address, triton.model_repository).index(timeout_ms=2_000)
        assert list(answer.values()) == [TritonState.READY]


async def test_a_hung_triton_is_out_of_service(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """B48: SIGSTOP: not accepting, with a reason, while it hangs, the loader alive; SIGCONT: back, nothing was lost."""
    model = model_record("m", knob_model(tmp_path / "m"))
    other = model_record("other", knob_model(tmp_path / "other", tokens=2))
    await put_catalogue(redis_url, [model, other])
    assert triton.server.child is not None
    async with loader:
        await loader.load(model)
        triton.server.child.send_signal(signal.SIGSTOP)
        try:
            state = await loader.wait_for(lambda state: not state.accepting, within_s=30)
            assert state.unhealthy_reason
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await loader.load(other)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            triton.server.child.send_signal(signal.SIGCONT)
        state = await loader.wait_for(lambda state: state.accepting, within_s=30)
        found = instance(state, model)
        assert found is not None
        assert found.state == READY


async def test_a_slow_load_leaves_the_node_in_service(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """B48: while one model loads for 3 s the node accepts and loads another one."""
    slow = model_record("slow", knob_model(tmp_path / "slow", load_ms=3000))
    quick = model_record("quick", knob_model(tmp_path / "quick", tokens=3))
    await put_catalogue(redis_url, [slow, quick])
    async with loader:
        loading = asyncio.create_task(loader.load(slow))
        assert (await loader.load(quick))[-1].state == READY
        assert not loading.done()
        assert (await loader.state()).accepting
        assert (await loading)[-1].state == READY


async def test_a_killed_triton_fails_the_load_and_the_next_one_works(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """Invariant 6: a load that died with Triton holds no bytes once Triton is back."""
    model = model_record("m", knob_model(tmp_path / "m", load_ms=2000))
    await put_catalogue(redis_url, [model])
    async with loader:
        loading = asyncio.create_task(loader.load(model))
        await loader.wait_for(
            lambda state: any(entry.state == vocabulary_pb2.INSTANCE_STATE_LOADING for entry in state.instances),
            within_s=30,
        )
        triton.kill()
        triton.start()  # from the main thread: the child lives as long as the thread that started it
        with pytest.raises(grpc.aio.AioRpcError):
            await loading
        await loader.wait_for(lambda state: state.accepting and device(state) == (0, 0), within_s=30)
        assert (await loader.load(model, reason="operator"))[-1].state == READY


async def test_a_load_that_hangs_ends_at_its_time_limit(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer
) -> None:
    """The caller is told; the bytes stay held while Triton still loads, and are free once it is done with it."""
    model = model_record("m", knob_model(tmp_path / "m", load_ms=9_000))
    other = model_record("other", knob_model(tmp_path / "other", tokens=4))
    await put_catalogue(redis_url, [model, other])
    loader.extra = {"LOAD_TIMEOUT_SECONDS": "1"}
    async with loader:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await loader.load(model)
        assert time.monotonic() - began < 8
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert device(await loader.state()) == (0, 100)
        assert (await loader.load(other))[-1].state == READY
        state = await loader.wait_for(lambda state: device(state) == (100, 0), within_s=60)
        found = instance(state, model)
        assert found is not None
        assert found.state == vocabulary_pb2.INSTANCE_STATE_FAILED


async def test_a_killed_loader_leaves_no_half_written_weights(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """Invariant 10: killed while it stages, nothing half-written has its final name; the next process stages it whole
    and leaves nothing behind."""
    folder = knob_model(tmp_path / "m")
    with (folder / "1" / "padding.bin").open("wb") as padding:
        for _ in range(600):
            padding.write(os.urandom(1024 * 1024))
    model = model_record("m", folder)
    (folder / "1" / "padding.bin").chmod(0o644)
    await put_catalogue(redis_url, [model])
    async with loader:
        loading = asyncio.create_task(loader.load(model))
        incoming, weights, files = (loader.cache / name for name in ("incoming", "weights", "files"))
        async with asyncio.timeout(30):
            while not any(_size(part) > 32 * 1024 * 1024 for part in incoming.glob("*.part")):  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.002)
        await loader.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await loading
        assert list(weights.iterdir()) == []
        assert all(_size(path) < 600 * 1024 * 1024 for path in files.rglob("*"))
        await loader.start()
        assert tier(await loader.state(), vocabulary_pb2.TIER_DISK).resident == 0
        assert (await loader.load(model))[-1].state == READY
        assert len(list(weights.iterdir())) == 1
        assert list(incoming.iterdir()) == []


def _size(path: Path) -> int:
    """Bytes of a file that another process may just be moving away."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


async def test_a_restarted_loader_adopts_what_triton_has(loader: LoaderProcess, redis_url: str, tmp_path: Path) -> None:
    """kill -9: the next process finds one known model and one that the catalogue dropped; the latter is unloaded."""
    marker = tmp_path / "loads"
    kept = model_record("kept", count_loads(knob_model(tmp_path / "kept"), marker))
    dropped = model_record("dropped", knob_model(tmp_path / "dropped", tokens=9))
    await put_catalogue(redis_url, [kept, dropped])
    async with loader:
        await loader.load(kept)
        await loader.load(dropped)
        await loader.kill()
        await put_catalogue(redis_url, [kept], generation=2)
        await loader.start()
        state = await loader.state()
        found = instance(state, kept)
        assert found is not None
        assert found.state == READY
        assert device(state) == (100, 0)
        assert (await loader.load(kept))[-1].state == READY
        assert loads_counted(marker) == 1
        assert await ready_in_triton(loader.triton, within_s=30) == {triton_name(kept)}


async def test_a_draining_loader_says_so_and_leaves_triton_alone(
    loader: LoaderProcess, redis_url: str, nats_url: str, tmp_path: Path
) -> None:
    """SIGTERM: the last state on the bus is not accepting, exit code 0, and the next process adopts the model."""
    model = model_record("m", knob_model(tmp_path / "m"))
    await put_catalogue(redis_url, [model])
    states: list[loading_pb2.NodeState] = []
    bus = await NatsBus.connect(nats_url, name="test")
    client: Client = bus._client

    async def hear(message: object) -> None:
        states.append(loading_pb2.NodeState.FromString(message.data))  # type: ignore[attr-defined]

    await client.subscribe("rh.v1.node.n1.state", cb=hear)
    try:
        async with loader:
            await loader.load(model)
            assert await loader.terminate() == 0
            await asyncio.sleep(0.1)
            assert not states[-1].accepting
            sequences = [state.sequence for state in states]
            assert sequences == sorted(set(sequences))
            await loader.start()
            found = instance(await loader.state(), model)
            assert found is not None
            assert found.state == READY
    finally:
        await bus.close()


async def test_the_bucket_comes_back_after_nats_lost_it(
    triton: TritonServer, nats_server: FaultyServer, redis_url: str, tmp_path: Path
) -> None:
    """B38: NATS restarts with an empty store; within seconds the node's state is in the bucket again."""
    loader = LoaderProcess(triton, nats_server.url, redis_url, tmp_path / "cache")
    await put_catalogue(redis_url, [model_record("m", knob_model(tmp_path / "m"))])
    async with loader:
        assert (await kept_state(nats_server.url)).node_id == "n1"
        assert isinstance(nats_server, ProgramServer)
        nats_server.kill()
        for leftover in sorted(nats_server.data.rglob("*"), reverse=True):
            leftover.rmdir() if leftover.is_dir() else leftover.unlink()
        nats_server.restart()
        assert (await kept_state(nats_server.url)).node_id == "n1"


async def test_loads_and_unloads_are_audited(
    loader: LoaderProcess, redis_url: str, nats_url: str, tmp_path: Path
) -> None:
    """The AUDIT stream says what was loaded, what was unloaded and for which other model."""
    one = model_record("one", knob_model(tmp_path / "one"), device_bytes=300)
    two = model_record("two", knob_model(tmp_path / "two", tokens=5), device_bytes=300)
    await put_catalogue(redis_url, [one, two])
    async with loader:
        await loader.load(one, reason="demand")
        await loader.load(two, first=[one], reason="demand")
        bus = await NatsBus.connect(nats_url, name="test")
        try:
            subscription = await bus.jetstream.pull_subscribe("rh.v1.audit.>", stream="AUDIT")
            messages = [message for _ in range(3) for message in await subscription.fetch(1, timeout=30)]
            events = [events_pb2.AuditEvent.FromString(message.data) for message in messages]
        finally:
            await bus.close()
    assert [(event.what, event.subject, event.reason) for event in events] == [
        ("load", "one", "demand"),
        ("unload", "one", "evicted"),
        ("load", "two", "demand"),
    ]
    assert events[1].details["made_room_for"] == f"two@{two.digest}"


def triton_name(model: Model) -> str:
    """The name of a record's version in Triton."""
    return triton_model_name(ModelVersion(model.name, model.digest))


async def ready_in_triton(triton: TritonServer, *, within_s: float) -> set[str]:
    """What Triton has, as soon as it has only one model."""
    control = TritonControl(triton.grpc_address, triton.model_repository)
    try:
        async with asyncio.timeout(within_s):
            while True:
                index = await control.index(timeout_ms=1_000)
                ready = {name for name, state in index.items() if state is not TritonState.UNAVAILABLE}
                if len(ready) == 1:
                    return ready
                await asyncio.sleep(0.05)
    finally:
        await control.close()


async def kept_state(url: str) -> loading_pb2.NodeState:
    """The node's state in the bucket, as soon as it is there."""
    bus = await NatsBus.connect(url, name="test")
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    bucket = await bus.jetstream.key_value(NODES_BUCKET)
                    return loading_pb2.NodeState.FromString((await bucket.get("n1")).value or b"")
                except JetStreamError:
                    await asyncio.sleep(0.1)
    finally:
        await bus.close()

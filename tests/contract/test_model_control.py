"""Triton's model control: the fake and the real server answer the same calls in the same way."""

import asyncio
import json
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferInput
from tritonclient.grpc import aio as triton_client

from engines.placement import Placement, placement_parameter
from roundhouse.clock import SystemClock
from roundhouse.errors import DeadlinePassed, EngineFailed, Unavailable
from services.loader.adapters.triton_control import TritonControl
from services.loader.ports import LoadPackage, ModelControl, PlacedModel, TritonState
from tests.conftest import TritonFactory
from tests.fakes.model_control import FakeModelControl
from tests.infra import TritonServer, wait_until

ANSWER_MS = 20_000  # an upper limit for a machine that stalls; it takes milliseconds
LOAD_MS = 20_000
MODEL = b"""
import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.knobs = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        time.sleep(int(self.knobs.get("load_ms", 0)) / 1e3)
        if "fail_load" in self.knobs:
            raise RuntimeError(self.knobs["fail_load"])

    def execute(self, requests):
        time.sleep(1.0)
        return [pb_utils.InferenceResponse([pb_utils.get_input_tensor_by_name(r, "X")]) for r in requests]

    def finalize(self):
        time.sleep(int(self.knobs.get("unload_ms", 0)) / 1e3)
"""
_names = count()


class Server(ABC):
    """One side of the contract."""

    control: ModelControl

    @abstractmethod
    async def hang(self) -> None:
        """Stop answering."""

    @abstractmethod
    async def go_on(self) -> None:
        """Answer again."""

    @abstractmethod
    async def restart(self) -> None:
        """Be killed and start again, empty."""

    @abstractmethod
    async def kill(self) -> None:
        """Be gone."""

    @abstractmethod
    def run_request(self, name: str) -> "asyncio.Task[None]":
        """Run one request of a second."""


class Fake(Server):
    """The fake."""

    def __init__(self) -> None:
        self.fake = FakeModelControl(SystemClock())
        self.control = self.fake

    async def hang(self) -> None:
        """Stop answering."""
        self.fake.hung = True

    async def go_on(self) -> None:
        """Answer again."""
        self.fake.hung = False

    async def restart(self) -> None:
        """Start again, empty."""
        self.fake.restart()

    async def kill(self) -> None:
        """Be gone."""
        self.fake.away = True

    def run_request(self, name: str) -> "asyncio.Task[None]":
        """Run one request of a second."""
        self.fake.begin_request(name)

        async def run() -> None:
            await asyncio.sleep(1.0)
            self.fake.end_request(name)

        return asyncio.create_task(run())


class Real(Server):
    """A Triton server."""

    def __init__(self, server: TritonServer, control: TritonControl) -> None:
        self.server = server
        self.control = control

    async def hang(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: one that runs on for a moment may still answer."""
        child = self.server.server.child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(wait_until, lambda: still_running(child.pid), within_s=30)

    async def go_on(self) -> None:
        """SIGCONT."""
        assert self.server.server.child is not None
        self.server.server.child.send_signal(signal.SIGCONT)

    async def restart(self) -> None:
        """SIGKILL and a new process."""
        self.server.kill()
        self.server.start()

    async def kill(self) -> None:
        """SIGKILL."""
        self.server.kill()

    def run_request(self, name: str) -> "asyncio.Task[None]":
        """Run one request of a second."""

        async def run() -> None:
            async with triton_client.InferenceServerClient(self.server.grpc_address) as client:
                tensor = InferInput("X", [1], "FP32")
                tensor.set_data_from_numpy(np.zeros(1, np.float32))
                await client.infer(name, [tensor])

        return asyncio.create_task(run())


@pytest.fixture(params=["fake", "real"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """Both sides."""
    if request.param == "fake":
        yield Fake()
        return
    factory: TritonFactory = request.getfixturevalue("triton_factory")
    triton = _server_of_module(request, factory)
    if not triton.server.alive:
        triton.start()
    control = TritonControl(triton.grpc_address, triton.model_repository)
    try:
        yield Real(triton, control)
    finally:
        await control.close()


def _server_of_module(request: pytest.FixtureRequest, factory: TritonFactory) -> TritonServer:
    module = request.node.getparent(pytest.Module)
    if not hasattr(module, "triton_of_contract"):
        module.triton_of_contract = factory()
    started: TritonServer = module.triton_of_contract
    return started


def package(**knobs: object) -> LoadPackage:
    """A model with knobs, and a name of its own."""
    config = {
        "backend": "python",
        "max_batch_size": 0,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {name: {"string_value": str(value)} for name, value in {"x": 0, **knobs}.items()},
    }
    return LoadPackage(json.dumps(config), {"file:1/model.py": MODEL})


def fresh_name() -> str:
    """A model name that no other test uses."""
    return f"m{next(_names)}--{'0' * 12}"


async def state_of(control: ModelControl, name: str) -> TritonState:
    """What the index says; what it does not list is not there."""
    return (await control.index(timeout_ms=ANSWER_MS)).get(name, TritonState.UNAVAILABLE)


async def until(control: ModelControl, name: str, wanted: TritonState) -> None:
    """Poll the index."""
    async with asyncio.timeout(60):
        while await state_of(control, name) is not wanted:  # noqa: ASYNC110 - Triton tells nobody
            await asyncio.sleep(0.02)


@asynccontextmanager
async def loaded(control: ModelControl, **knobs: object) -> AsyncIterator[str]:
    """A loaded model, unloaded afterwards."""
    name = fresh_name()
    await control.load(name, package(**knobs), timeout_ms=LOAD_MS)
    try:
        yield name
    finally:
        await control.unload(name, timeout_ms=ANSWER_MS)


async def test_a_loaded_model_is_ready_in_the_index(server: Server) -> None:
    """`load` returns when the model is ready, and the index lists it."""
    async with loaded(server.control) as name:
        assert await state_of(server.control, name) is TritonState.READY


async def test_a_loaded_model_knows_its_devices(server: Server) -> None:
    """What its package named, as long as it is loaded; a package that named none names none later."""
    placement = placement_parameter(Placement(("GPU-1", "MIG-2"), "a"))
    async with loaded(server.control, devices=placement) as name:
        assert await server.control.placed_on(name, timeout_ms=ANSWER_MS) == PlacedModel(("GPU-1", "MIG-2"), "a")
    async with loaded(server.control) as name:
        assert await server.control.placed_on(name, timeout_ms=ANSWER_MS) == PlacedModel()
    with pytest.raises(EngineFailed):
        await server.control.placed_on(fresh_name(), timeout_ms=ANSWER_MS)


async def test_loading_twice_changes_nothing(server: Server) -> None:
    """The second call returns and the model stays ready."""
    async with loaded(server.control) as name:
        await server.control.load(name, package(), timeout_ms=LOAD_MS)
        assert await state_of(server.control, name) is TritonState.READY


async def test_an_unloaded_model_becomes_unavailable(server: Server) -> None:
    """`unload` may return before the memory is free; the index tells when it is."""
    async with loaded(server.control, unload_ms=300) as name:
        await server.control.unload(name, timeout_ms=ANSWER_MS)
        assert await state_of(server.control, name) is TritonState.UNLOADING
        await until(server.control, name, TritonState.UNAVAILABLE)
        await server.control.forget(name)
        assert await state_of(server.control, name) is TritonState.UNAVAILABLE


async def test_a_running_request_holds_up_the_unload(server: Server) -> None:
    """In-flight work ends first: the state is UNLOADING until then (invariant 8)."""
    async with loaded(server.control) as name:
        request = server.run_request(name)
        await asyncio.sleep(0.3)
        await server.control.unload(name, timeout_ms=ANSWER_MS)
        assert await state_of(server.control, name) is TritonState.UNLOADING
        assert not request.done()
        await request
        await until(server.control, name, TritonState.UNAVAILABLE)


async def test_a_failed_load_tells_the_cause_and_holds_nothing(server: Server) -> None:
    """B18: the engine's words, without what Triton puts around them; the index says unavailable."""
    name = fresh_name()
    for _ in range(2):
        with pytest.raises(EngineFailed) as failed:
            await server.control.load(name, package(fail_load="no such tensor"), timeout_ms=LOAD_MS)
        assert "no such tensor" in failed.value.message
        assert "UNAVAILABLE" not in failed.value.message
    assert await state_of(server.control, name) is TritonState.UNAVAILABLE


async def test_a_slow_load_is_loading_and_others_are_served(server: Server) -> None:
    """One slow load neither blocks the index nor another load."""
    name = fresh_name()
    slow = asyncio.create_task(server.control.load(name, package(load_ms=1500), timeout_ms=LOAD_MS))
    await until(server.control, name, TritonState.LOADING)
    async with loaded(server.control):
        assert not slow.done()
    await slow
    assert await state_of(server.control, name) is TritonState.READY
    await server.control.unload(name, timeout_ms=ANSWER_MS)


async def test_a_load_beyond_its_time_limit_goes_on_in_triton(server: Server) -> None:
    """DeadlinePassed for the caller; the index still says LOADING; an unload asked meanwhile happens after it."""
    name = fresh_name()
    with pytest.raises(DeadlinePassed):
        await server.control.load(name, package(load_ms=3000), timeout_ms=500)
    assert await state_of(server.control, name) is TritonState.LOADING
    with pytest.raises(DeadlinePassed):
        await server.control.unload(name, timeout_ms=100)
    await until(server.control, name, TritonState.UNAVAILABLE)


async def test_unloading_what_is_not_loaded_changes_nothing(server: Server) -> None:
    """No error, nothing in the index."""
    name = fresh_name()
    await server.control.unload(name, timeout_ms=ANSWER_MS)
    assert await state_of(server.control, name) is TritonState.UNAVAILABLE
    await server.control.forget(name)
    await server.control.forget(name)


def still_running(pid: int) -> str | None:
    """The states of threads that are not stopped, as in proc(5); None if all are."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    states = {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} - set("TtZ")
    return f"threads are {sorted(states)}" if states else None


async def test_a_hung_server_ends_every_call_at_its_limit(server: Server) -> None:
    """B48: probe and index raise DeadlinePassed within their time, and work again afterwards."""
    async with loaded(server.control) as name:
        await server.hang()
        try:
            for call in (server.control.probe, server.control.index):
                with pytest.raises(DeadlinePassed):
                    async with asyncio.timeout(20):
                        await call(timeout_ms=300)
        finally:
            await server.go_on()
        await server.control.probe(timeout_ms=ANSWER_MS)
        assert await state_of(server.control, name) is TritonState.READY


async def test_a_restarted_server_is_empty_and_a_dead_one_unavailable(server: Server) -> None:
    """What was loaded is gone after a restart, and the same control reaches the new process soon."""
    name = fresh_name()
    await server.control.load(name, package(), timeout_ms=LOAD_MS)
    await server.kill()
    with pytest.raises(Unavailable):
        await server.control.probe(timeout_ms=ANSWER_MS)
    await server.restart()
    async with asyncio.timeout(30):
        while True:
            try:
                await server.control.probe(timeout_ms=ANSWER_MS)
                break
            except Unavailable:
                await asyncio.sleep(0.05)
    assert await state_of(server.control, name) is TritonState.UNAVAILABLE
    async with loaded(server.control) as other:
        assert await state_of(server.control, other) is TritonState.READY

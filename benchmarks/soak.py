"""Models loaded and unloaded again and again on a real Triton by a real loader: what is left afterwards.

A cycle is one load, one answered request and one unload of one model; four models go round beside each other, each in
its own task, so that loads, unloads and requests meet. Afterwards the account must be exact, and there must be no
process, no shared memory and no folder of any of them. Memory is compared after the first tenth and at the end.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import resident_bytes
from benchmarks.report import Goal, Report
from roundhouse.catalogue.records import Engine, Model
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.loader.adapters.model_processes import StubProcesses
from tests import infra
from tests.builders.checkpoints import knob_model, random_checkpoint
from tests.integration.engines.engine_server import EngineServer
from tests.integration.loader.loader_process import LoaderProcess, device, model_record, put_catalogue, tier

NAME = "soak"
DESCRIPTION = "load and unload cycles on real Triton: account, memory, processes and shared memory afterwards"
TOGETHER = 4
DEVICE_BYTES = 2**30
MODEL_BYTES = 100 * 2**20
# Triton itself keeps some memory for every load (triton-inference-server/server#3320); a Python process a little slack.
TRITON_GROWTH_BYTES_MAX = 50_000  # a cycle
LOADER_GROWTH_BYTES_MAX = 20_000
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


@dataclass(slots=True)
class Outcome:
    """What a run showed."""

    cycles: int = 0
    wrong_accounts: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    growth_bytes: dict[str, float] = field(default_factory=dict)  # a cycle, by process
    shared_memory_left: int = 0
    processes_left: int = 0
    folders_left: int = 0
    device_left: tuple[int, int] = (0, 0)
    host_reserved_left: int = 0


def run(arguments: Sequence[str]) -> Report:
    """Run the cycles; the figures of what is left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak")
    parser.add_argument("--cycles", type=int, default=1_000, help="loads and unloads in all (default 1000)")
    options = parser.parse_args(arguments)
    outcome = soak(options.cycles)
    figures: dict[str, float | int | str] = {
        "cycles": outcome.cycles,
        "seconds": outcome.seconds,
        "cycles_per_second": outcome.cycles / outcome.seconds,
        **{f"{name}_growth_bytes_per_cycle": growth for name, growth in outcome.growth_bytes.items()},
    }
    if outcome.failures:
        figures["first_failure"] = outcome.failures[0][:200]
    goals = [
        Goal.at_most("cycles that failed", 0, len(outcome.failures)),
        Goal.at_most("looks at the account that found it wrong", 0, outcome.wrong_accounts),
        Goal.at_most("bytes of the device left in the account", 0, sum(outcome.device_left)),
        Goal.at_most("bytes of host memory left reserved", 0, outcome.host_reserved_left),
        Goal.at_most("model processes left", 0, outcome.processes_left),
        Goal.at_most("shared-memory segments left", 0, outcome.shared_memory_left),
        Goal.at_most("folders left in Triton's repository", 0, outcome.folders_left),
        Goal.at_most("growth of Triton, bytes a cycle", TRITON_GROWTH_BYTES_MAX, outcome.growth_bytes["triton"]),
        Goal.at_most("growth of the loader, bytes a cycle", LOADER_GROWTH_BYTES_MAX, outcome.growth_bytes["loader"]),
    ]
    return Report(NAME, figures, {}, goals)


def soak(cycles: int) -> Outcome:
    """Run `cycles` cycles on servers of their own."""
    with tempfile.TemporaryDirectory(prefix="rh-soak-") as name, ExitStack() as stack:
        folder = Path(name)
        nats = stack.enter_context(infra.nats_running(_made(folder / "nats")))
        valkey = stack.enter_context(infra.valkey_running(_made(folder / "valkey")))
        triton = infra.TritonServer(_made(folder / "triton"))
        stack.callback(triton.kill)
        triton.start()
        loader = LoaderProcess(triton, nats.url, valkey.url, folder / "cache")
        loader.extra = {"DEVICE_BYTES": str(DEVICE_BYTES)}
        return asyncio.run(_Soak(folder, triton, loader, valkey.url).run(cycles))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class _Soak:
    def __init__(self, folder: Path, triton: infra.TritonServer, loader: LoaderProcess, redis_url: str) -> None:
        self._folder = folder
        self._triton = triton
        self._loader = loader
        self._redis_url = redis_url
        self._outcome = Outcome()
        self._served = EngineServer(triton.grpc_address, triton.log)

    async def run(self, cycles: int) -> Outcome:
        """All of it."""
        models = self._models()
        await put_catalogue(self._redis_url, models)
        loop = asyncio.get_running_loop()
        async with self._loader:
            await self._rounds(models, 1)  # what the first load of each brings is no growth
            shared_before = self._segments()
            began = loop.time()
            first = max(1, cycles // TOGETHER // 10)
            await self._rounds(models, first)
            early = self._memory()
            rest = max(1, cycles // TOGETHER - first)
            await self._rounds(models, rest)
            self._outcome.seconds = loop.time() - began
            late = self._memory()
            per_cycle = {name: (late[name] - early[name]) / (rest * TOGETHER) for name in late}
            self._outcome.growth_bytes = per_cycle
            await self._look_around(models, shared_before)
        self._served.client.close()
        return self._outcome

    def _models(self) -> list[Model]:
        made = []
        for number in range(TOGETHER):
            place = self._folder / f"model-{number}"
            if number % 2:
                folder, engine = knob_model(place, tokens=number + 3, token_interval_ms=0), Engine.TRITON
            else:
                folder, engine = random_checkpoint(place, seed=number), Engine.REFERENCE
            made.append(model_record(f"m{number}", folder, device_bytes=MODEL_BYTES, engine=engine))
        return made

    async def _rounds(self, models: Sequence[Model], rounds: int) -> None:
        await asyncio.gather(*(self._go_round(model, rounds) for model in models))
        self._check(await self._loader.state())

    async def _go_round(self, model: Model, rounds: int) -> None:
        for _ in range(rounds):
            try:
                await self._cycle(model)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a figure of this run
                self._outcome.failures.append(f"{model.name}: {type(error).__name__}: {error}")
            self._outcome.cycles += 1

    async def _cycle(self, model: Model) -> None:
        loaded = (await self._loader.load(model, reason="operator"))[-1]
        self._check(await self._loader.state())
        name = loaded.instance.triton_model_name
        answer = await asyncio.to_thread(self._served.ask, name, "hello", max_tokens=3)
        if answer.error is not None:
            self._outcome.failures.append(f"{model.name}: {answer.error}")
        await self._loader.unload(model)

    def _check(self, state: loading_pb2.NodeState) -> None:
        """The account is what the instances say of themselves, at every look."""
        holding = (
            vocabulary_pb2.INSTANCE_STATE_READY,
            vocabulary_pb2.INSTANCE_STATE_DRAINING,
            vocabulary_pb2.INSTANCE_STATE_UNLOADING,
        )
        resident = sum(each.device_bytes for each in state.instances if each.state in holding)
        if device(state)[0] != resident:
            self._outcome.wrong_accounts += 1

    def _memory(self) -> dict[str, int]:
        assert self._triton.server.child is not None
        assert self._loader.process is not None
        groups = {"triton": self._triton.server.child.pid}
        found = resident_bytes(groups)
        pages = int(Path(f"/proc/{self._loader.process.pid}/statm").read_text().split()[1])
        return {"triton": found["triton"], "loader": pages * 4096}

    def _segments(self) -> set[str]:
        return {path.name for path in SHARED_MEMORY.glob(f"{self._triton.shared_memory_prefix}*")}

    async def _look_around(self, models: Sequence[Model], shared_before: set[str]) -> None:
        state = await self._loader.state()
        self._outcome.device_left = device(state)
        self._outcome.host_reserved_left = tier(state, vocabulary_pb2.TIER_HOST).reserved
        self._outcome.shared_memory_left = len(self._segments() - shared_before)
        stubs = StubProcesses(self._triton.ports.grpc)
        names = [each.triton_model_name for each in state.instances]
        found = [await stubs.find(name) for name in names]
        self._outcome.processes_left = sum(len(pids or ()) for pids in found)
        self._outcome.folders_left = len(list(self._triton.model_repository.iterdir()))

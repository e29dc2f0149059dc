"""A whole loader process on real NATS, Valkey and Triton, and a catalogue of test models."""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from deploy.local.ports import free_ports
from roundhouse.catalogue.digests import version_digest
from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.environment import child_environment
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import ModelName
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc, vocabulary_pb2
from tests.infra import TritonServer

READY = vocabulary_pb2.INSTANCE_STATE_READY
STARTED_WITHIN_S = 30
HOST_BYTES = 64 * 1024 * 1024
Predicate = Callable[[loading_pb2.NodeState], bool]


def model_record(name: str, folder: Path, *, device_bytes: int = 100, engine: Engine = Engine.TRITON) -> Model:
    """A catalogue record of what lies in `folder` now."""
    return Model(
        name=ModelName(name),
        source_path=str(folder),
        engine=engine,
        interface=Interface.LLM,
        digest=version_digest(folder),
        slots=4,
        device_bytes=device_bytes,
        kv_pool_tokens=1024,
        context_tokens=512,
    )


async def put_catalogue(redis_url: str, models: Sequence[Model], generation: int = 1) -> None:
    """Make these models the catalogue."""
    redis = open_redis(redis_url)
    try:
        catalogue = Catalogue(generation=generation, models={model.name: model for model in models})
        await CatalogueStore(redis).put(catalogue, expected_generation=generation - 1)
    finally:
        await redis.aclose()


def version_of(model: Model) -> vocabulary_pb2.ModelVersion:
    """The wire form of a record's version."""
    return vocabulary_pb2.ModelVersion(model=model.name, digest=model.digest)


@dataclass(slots=True)
class LoaderProcess:
    """One `python -m services.loader`. Use as an async context manager."""

    triton: TritonServer
    nats_url: str
    redis_url: str
    cache: Path
    extra: Mapping[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    process: asyncio.subprocess.Process | None = None
    channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> "LoaderProcess":
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.channel is not None:
            await self.channel.close()
        await self.kill()

    @property
    def stub(self) -> "loading_pb2_grpc.LoaderAsyncStub":
        """The loader's service."""
        assert self.channel is not None
        return loading_pb2_grpc.LoaderStub(self.channel)

    async def start(self) -> None:
        """Start and wait until the node is healthy."""
        environment = {
            "NODE_ID": "n1",
            "NATS_URL": self.nats_url,
            "REDIS_URL": self.redis_url,
            "GRPC_PORT": str(self.ports[0]),
            "OPS_PORT": str(self.ports[1]),
            "TRITON_GRPC": self.triton.grpc_address,
            "TRITON_REPOSITORY": str(self.triton.model_repository),
            "DEVICE_BYTES": "400",
            "CACHE_DIR": str(self.cache),
            "HOST_BYTES": str(HOST_BYTES),
            "HOST_ARENA": str(self.cache.with_suffix(".arena")),
            "LOAD_TIMEOUT_SECONDS": "20",
            "DRAIN_SECONDS": "5",
            **self.extra,
        }
        log = self.cache.with_suffix(".log").open("ab")
        with log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.loader",
                stdout=log,
                stderr=log,
                env=child_environment({f"ROUNDHOUSE_{name}": value for name, value in environment.items()}),
            )
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.ports[0]}", options=[("grpc.max_reconnect_backoff_ms", 200)]
        )
        await self.wait_for(lambda state: state.accepting, within_s=STARTED_WITHIN_S)

    async def kill(self) -> None:
        """SIGKILL; waits for the end. Idempotent."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    async def state(self) -> loading_pb2.NodeState:
        """What the node says of itself now."""
        return await self.stub.GetNodeState(loading_pb2.GetNodeStateRequest(), timeout=2)

    async def wait_for(self, holds: Predicate, *, within_s: float) -> loading_pb2.NodeState:
        """Ask until the state is as wished. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    state = await self.state()
                except grpc.aio.AioRpcError:
                    state = None
                if state is not None and holds(state):
                    return state
                await asyncio.sleep(0.05)

    async def load(
        self,
        model: Model,
        generation: int = 0,
        *,
        first: Sequence[Model] = (),
        deadline_ms: int = 30_000,
        reason: str = "",
        devices: Sequence[int] = (),
    ) -> list[loading_pb2.LoadProgress]:
        """EnsureLoaded to its end; every message."""
        request = loading_pb2.EnsureLoadedRequest(
            version=version_of(model),
            generation=generation,
            unload_first=[version_of(victim) for victim in first],
            deadline_ms=deadline_ms,
            reason=reason,
            devices=devices,
        )
        return [progress async for progress in self.stub.EnsureLoaded(request, timeout=40)]

    async def unload(self, model: Model, generation: int = 0, *, reason: str = "operator") -> bool:
        """EnsureUnloaded; whether it was loaded."""
        request = loading_pb2.EnsureUnloadedRequest(
            version=version_of(model), generation=generation, deadline_ms=30_000, reason=reason
        )
        return (await self.stub.EnsureUnloaded(request, timeout=40)).was_loaded


def tier(state: loading_pb2.NodeState, which: "vocabulary_pb2.Tier.ValueType") -> vocabulary_pb2.TierBytes:
    """One tier of a state."""
    return next(entry for entry in state.tiers if entry.tier == which)


def device(state: loading_pb2.NodeState) -> tuple[int, int]:
    """(resident, reserved) bytes of the device tier."""
    entry = tier(state, vocabulary_pb2.TIER_DEVICE)
    return entry.resident, entry.reserved


def instance(state: loading_pb2.NodeState, model: Model) -> loading_pb2.Instance | None:
    """The instance of a model's version, if it is listed."""
    return next((entry for entry in state.instances if entry.version == version_of(model)), None)


def is_ready(state: loading_pb2.NodeState, model: Model) -> bool:
    """Whether the model's version is ready on the node."""
    found = instance(state, model)
    return found is not None and found.state == READY


def count_loads(folder: Path, marker: Path) -> Path:
    """Make a knob model write a line to `marker` each time the backend loads it."""
    marker.touch()
    with (folder / "1" / "model.py").open("a") as source:
        source.write(
            f"""

def _counted(self, args, _initialize=TritonPythonModel.initialize):
    with open({str(marker)!r}, "a") as marker:
        marker.write("load\\n")
    _initialize(self, args)


TritonPythonModel.initialize = _counted
"""
        )
    return folder


def loads_counted(marker: Path) -> int:
    """How often the backend loaded it."""
    return len(marker.read_text().splitlines())

"""The whole embedded cluster for end-to-end tests, run from a thread of its own so that tests keep their event loops.

The thread lives as long as the mesh: the kernel ties the parts to the thread that started them.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deploy.local.admin_client import AdminClient
from deploy.local.child import ChildProcess
from deploy.local.cluster import RunningCluster, running_cluster
from deploy.local.home import Home
from deploy.local.parts import ClusterOptions
from deploy.local.supervisor import PartEvent
from tests.infra import wait_until

Result = TypeVar("Result")
START_WITHIN_S = 90.0
STOP_WITHIN_S = 90.0


@dataclass(slots=True)
class Mesh:
    """A running mesh. Parts: nats, valkey, triton-N, kvstore-N, loader-N, metering, scheduler, gateway."""

    home: Home
    http_url: str
    grpc_address: str
    admin_url: str
    admin_key: str
    keys: dict[str, str]  # tenant → key with the scopes inference and usage:read
    nats_url: str
    redis_url: str
    catalogue: Path
    events: list[PartEvent]
    _cluster: RunningCluster
    _loop: asyncio.AbstractEventLoop

    @property
    def pids(self) -> dict[str, int]:
        """Part → pid, which is also its process group."""
        return {state.name: state.pid for state in self._cluster.supervisor.states()}

    @property
    def restarts(self) -> dict[str, int]:
        """Part → how often it was started again."""
        return {state.name: state.restarts for state in self._cluster.supervisor.states()}

    def kill(self, part: str) -> None:
        """SIGKILL a part and keep it down until `restart`."""
        self._cluster.supervisor.hold_down(part)
        self._cluster.supervisor.server(part).kill()

    def crash(self, part: str) -> None:
        """SIGKILL a part; the supervisor starts it again, as in production."""
        self._cluster.supervisor.server(part).kill()

    def restart(self, part: str) -> None:
        """Let a killed part start again and wait until it is ready."""
        self._loop.call_soon_threadsafe(self._cluster.supervisor.release, part)
        wait_until(lambda: self.why_not_ready(part), within_s=30)

    def why_not_ready(self, part: str) -> str | None:
        """None if the part runs and is ready, else the reason."""
        supervisor = self._cluster.supervisor
        if not supervisor.server(part).alive:
            return f"{part} does not run"
        return next(known for known in self._cluster.plan.parts if known.name == part).ready()

    def wait_ready(self, within_s: float = 120.0) -> None:
        """Wait until every part is ready. Raises TimeoutError with the reason."""
        for part in self._cluster.plan.parts:
            wait_until(lambda name=part.name: self.why_not_ready(name), within_s=within_s)  # type: ignore[misc]

    def process(self, part: str) -> ChildProcess:
        """A part's process, to send signals to."""
        child = self._cluster.supervisor.server(part).child
        assert child is not None, f"{part} was never started"
        return child

    def ops_url(self, part: str) -> str:
        """Where a service serves /health/ready and /metrics."""
        port = next(known.ops_port for known in self._cluster.plan.parts if known.name == part)
        return f"http://127.0.0.1:{port}"

    def log(self, part: str) -> str:
        """Everything a part has logged."""
        return self.home.log(part).read_text(errors="replace")


@contextmanager
def mesh_running(root: Path, options: ClusterOptions, catalogue: Path) -> Iterator[Mesh]:
    """Start a mesh on free ports, apply the catalogue and make a key for each of its tenants; stop it at the end."""
    home = Home(root)
    with _LoopThread() as thread:
        events: list[PartEvent] = []
        manager = running_cluster(home, options, events.append)
        cluster = thread.run(manager.__aenter__, START_WITHIN_S)
        try:
            keys = thread.run(lambda: _prepare(cluster, catalogue), START_WITHIN_S)
            plan = cluster.plan
            yield Mesh(
                home=home,
                http_url=plan.http_url,
                grpc_address=f"127.0.0.1:{plan.grpc_port}",
                admin_url=plan.admin_url,
                admin_key=cluster.secrets.admin_key,
                keys=keys,
                nats_url=plan.nats_url,
                redis_url=plan.redis_url,
                catalogue=catalogue,
                events=events,
                _cluster=cluster,
                _loop=thread.loop,
            )
        finally:
            thread.run(lambda: manager.__aexit__(None, None, None), STOP_WITHIN_S)


async def _prepare(cluster: RunningCluster, catalogue: Path) -> dict[str, str]:
    admin = AdminClient(cluster.plan.admin_url, cluster.secrets.admin_key)
    try:
        await admin.apply(catalogue)
        keys = {tenant: await admin.create_key(tenant) for tenant in (await admin.catalogue())["tenants"]}
        await cluster.wait_ready()
    finally:
        await admin.close()
    return keys


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="mesh")

    def __enter__(self) -> "_LoopThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], within_s: float) -> Result:
        """Run a coroutine there and wait for its result."""
        return asyncio.run_coroutine_threadsafe(_awaited(work), self.loop).result(within_s)


async def _awaited(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    return await work()

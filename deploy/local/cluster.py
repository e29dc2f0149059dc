"""The embedded cluster as one thing: `async with running_cluster(home, options, listener) as cluster`.

It owns the folder's lock, the processes and the written state. It does not know models or keys; `bootstrap.py` does.
Invariant: when the context is left, for whatever reason, no process and no shared memory of the cluster remains.
"""

import asyncio
import os
import secrets as chance
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from deploy.local.child import process_start_ticks
from deploy.local.home import ClusterProblem, ClusterState, Home, Secrets
from deploy.local.leftovers import remove_leftovers
from deploy.local.parts import ClusterOptions, ClusterPlan, plan_cluster
from deploy.local.ports import is_free
from deploy.local.server import PartFailed, remove_shared_memory
from deploy.local.supervisor import Listener, PartEvent, Phase, Supervisor

ADMIN_KEY_BYTES = 24
READY_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster whose parts serve."""

    home: Home
    plan: ClusterPlan
    supervisor: Supervisor
    secrets: Secrets

    async def wait_ready(self) -> None:
        """Wait until every part can work, then say so in the state. Raises ClusterProblem."""
        try:
            await self.supervisor.wait_ready(READY_WITHIN_S)
        except PartFailed as failure:
            raise ClusterProblem(str(failure)) from failure
        self.write_state(ready=True)

    def write_state(self, *, ready: bool) -> None:
        """Replace run/state.json."""
        self.home.write_state(_state(self.plan, self.supervisor, ready=ready))


@asynccontextmanager
async def running_cluster(
    home: Home, options: ClusterOptions, listener: Listener, note: Callable[[str], None] = lambda _: None
) -> AsyncIterator[RunningCluster]:
    """Start every part; stop all at the end. `note` gets what was cleaned up first.

    Raises ClusterProblem before anything is started if the folder is in use, of another layout, or a port is taken;
    after stopping what it had started, if a part fails."""
    home.prepare()
    with home.locked():
        for done in remove_leftovers(home):
            note(done)
        require_free_ports(options)
        secrets = keep_secrets(home)
        try:
            plan = plan_cluster(home, options, secrets.admin_key)
        except PartFailed as failure:
            raise ClusterProblem(str(failure)) from failure
        supervisor = Supervisor(plan.parts, lambda event: _listen(event))
        cluster = RunningCluster(home, plan, supervisor, secrets)

        def _listen(event: PartEvent) -> None:
            if event.phase in (Phase.STARTING, Phase.SERVING, Phase.CRASHED):
                previous = home.read_state()
                with suppress(OSError):  # a full disk must not end the watch over the parts
                    cluster.write_state(ready=previous is not None and previous.ready)
            listener(event)

        try:
            await supervisor.start()
            yield cluster
        except PartFailed as failure:
            raise ClusterProblem(str(failure)) from failure
        finally:
            await _end(home, supervisor)


async def _end(home: Home, supervisor: Supervisor) -> None:
    """Stop everything, also when this task is being cancelled meanwhile."""
    stopping = asyncio.ensure_future(supervisor.stop())
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        supervisor.kill_now()
        await stopping
        raise
    finally:
        remove_shared_memory(home.shared_memory_prefix)
        home.state_file.unlink(missing_ok=True)


def require_free_ports(options: ClusterOptions) -> None:
    """Raise ClusterProblem if a chosen port is taken, naming the option that changes it."""
    chosen = {"--http-port": options.http_port, "--grpc-port": options.grpc_port, "--admin-port": options.admin_port}
    for option, port in chosen.items():
        if port and not is_free(port):
            raise ClusterProblem(f"port {port} is taken by another program: choose another with {option}")
    given = [port for port in chosen.values() if port]
    if len(set(given)) != len(given):
        raise ClusterProblem(f"{', '.join(chosen)} must differ from each other")


def keep_secrets(home: Home) -> Secrets:
    """The kept keys, or a new admin key. Raises ClusterProblem if the file is broken."""
    kept = home.read_secrets()
    if kept is None:
        kept = Secrets(admin_key=f"rh-admin-{chance.token_urlsafe(ADMIN_KEY_BYTES)}")
        home.write_secrets(kept)
    return kept


def _state(plan: ClusterPlan, supervisor: Supervisor, *, ready: bool) -> ClusterState:
    return ClusterState(
        pid=os.getpid(),
        start_ticks=process_start_ticks(os.getpid()) or 0,
        started_unix_ms=time.time_ns() // 1_000_000,
        http_port=plan.http_port,
        grpc_port=plan.grpc_port,
        admin_port=plan.admin_port,
        nats_url=plan.nats_url,
        redis_url=plan.redis_url,
        ready=ready,
        parts=supervisor.states(),
    )

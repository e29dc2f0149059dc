"""Starts the parts in order, restarts what crashes or hangs, and stops all in reverse order.

What it does not do: decide whether the mesh works as a whole; each part's readiness says that. A restart keeps port,
data and settings, so that nobody has to be told. Invariant: after `stop`, no process of any part is alive.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from deploy.local.home import PartState
from deploy.local.parts import Part, Tier
from deploy.local.server import LocalServer, PartFailed

BACK_OFF_FIRST_S = 0.5
BACK_OFF_LIMIT_S = 15.0  # a guess: long enough not to fill the log, short enough for a person who waits
GUARD_INTERVAL_S = 2.0  # a part costs a connection each turn
STEADY_AFTER_S = 30.0  # a part that ran this long starts its back-off anew

Result = TypeVar("Result")


class Phase(StrEnum):
    """What happened to a part."""

    STARTING = "starting"
    SERVING = "serving"
    CRASHED = "crashed"
    HUNG = "hung"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PartEvent:
    """One change of one part; `detail` is for people."""

    part: str
    phase: Phase
    detail: str = ""


Listener = Callable[[PartEvent], None]


class Supervisor:
    """Owner of the processes of one cluster. Use it from the main thread's event loop."""

    def __init__(self, parts: tuple[Part, ...], listener: Listener) -> None:
        self._parts = parts
        self._servers = {part.name: LocalServer(part.program) for part in parts}
        self._restarts = dict.fromkeys(self._servers, 0)
        self._started_unix_ms = dict.fromkeys(self._servers, 0)
        self._listener = listener
        self._may_run = {name: asyncio.Event() for name in self._servers}
        for allowed in self._may_run.values():
            allowed.set()
        self._watchers: list[asyncio.Task[None]] = []
        # One thread a part: a probe may wait a second for an answer.
        self._threads = ThreadPoolExecutor(max_workers=len(parts), thread_name_prefix="part")

    async def start(self) -> None:
        """Start the stores and engines, then our services. Raises PartFailed; then call `stop`."""
        await self._start_together(self._of(lambda tier: tier <= Tier.ENGINE))
        await self._start_together(self._of(lambda tier: tier > Tier.ENGINE))
        for part in self._parts:
            self._watchers.append(asyncio.create_task(self._watch(part), name=f"watch-{part.name}"))
            self._watchers.append(asyncio.create_task(self._guard(part), name=f"guard-{part.name}"))

    async def wait_ready(self, within_s: float) -> None:
        """Wait until every part can work. Raises PartFailed with the first reason."""
        deadline = time.monotonic() + within_s
        for part in self._parts:
            while (reason := await self._in_thread(part.ready)) is not None:
                if time.monotonic() > deadline:
                    raise PartFailed(f"{part.name} is not ready after {within_s:.0f} s: {reason}")
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop all, those first that use the others. Idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for tier in reversed(Tier):
            await asyncio.gather(*(self._stop(part) for part in self._parts if part.tier is tier))
        self._threads.shutdown(wait=False)

    def kill_now(self) -> None:
        """SIGKILL to all at once, for impatient people."""
        for server in self._servers.values():
            server.kill()

    def states(self) -> list[PartState]:
        """Every part that has a process."""
        return [
            PartState(
                name=part.name,
                pid=child.pid,
                start_ticks=child.start_ticks,
                port=part.program.port,
                ops_port=part.ops_port,
                started_unix_ms=self._started_unix_ms[part.name],
                restarts=self._restarts[part.name],
            )
            for part in self._parts
            if (child := self._servers[part.name].child) is not None
        ]

    def server(self, name: str) -> LocalServer:
        """The server of a part, for fault tests. Raises KeyError."""
        return self._servers[name]

    def hold_down(self, name: str) -> None:
        """Do not restart this part when it ends, until `release`: for fault tests."""
        self._may_run[name].clear()

    def release(self, name: str) -> None:
        """Restart this part again when it ends, at once if it is down."""
        self._may_run[name].set()

    def _of(self, wanted: Callable[[Tier], bool]) -> list[Part]:
        return [part for part in self._parts if wanted(part.tier)]

    async def _start_together(self, parts: list[Part]) -> None:
        try:
            async with asyncio.TaskGroup() as starting:
                for part in parts:
                    starting.create_task(self._start(part))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _start(self, part: Part) -> None:
        server = self._servers[part.name]
        self._listener(PartEvent(part.name, Phase.STARTING))
        server.spawn()
        self._started_unix_ms[part.name] = time.time_ns() // 1_000_000
        await self._in_thread(server.wait_ready)
        self._listener(PartEvent(part.name, Phase.SERVING))

    async def _stop(self, part: Part) -> None:
        self._listener(PartEvent(part.name, Phase.STOPPING))
        await self._in_thread(self._servers[part.name].stop)
        self._listener(PartEvent(part.name, Phase.STOPPED))

    async def _watch(self, part: Part) -> None:
        """Wait for the end of a part and start it again, for ever."""
        back_off_s, before = BACK_OFF_FIRST_S, None
        while True:
            child = self._servers[part.name].child
            assert child is not None, "a watched part was started"
            code = await child.exited()
            if child is not before and time.monotonic() - child.started_monotonic > STEADY_AFTER_S:
                back_off_s = BACK_OFF_FIRST_S
            before = child
            detail = f"ended with {_say_code(code)}; starting it again in {back_off_s:.1f} s"
            self._listener(PartEvent(part.name, Phase.CRASHED, detail))
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, BACK_OFF_LIMIT_S)
            await self._in_thread(child.kill)  # what is left of its group
            await self._may_run[part.name].wait()
            self._restarts[part.name] += 1
            try:
                await self._start(part)
            except (PartFailed, OSError) as failure:  # it did not come up, or there is nothing to start it from
                self._listener(PartEvent(part.name, Phase.FAILED, str(failure).partition("\n")[0]))
                await self._in_thread(self._servers[part.name].kill)

    async def _guard(self, part: Part) -> None:
        """Kill a part that runs but does not answer any more; `_watch` starts it again."""
        server = self._servers[part.name]
        answered = time.monotonic()
        while True:
            await asyncio.sleep(min(GUARD_INTERVAL_S, part.hung_after_s / 2))
            if not server.alive or await self._in_thread(part.program.probe) is None:
                answered = time.monotonic()
            elif time.monotonic() - answered > part.hung_after_s:
                self._listener(PartEvent(part.name, Phase.HUNG, f"does not answer for {part.hung_after_s:.0f} s"))
                await self._in_thread(server.kill)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _say_code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"

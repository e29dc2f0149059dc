"""How a service process lives: start, background work, a drain on SIGTERM or SIGINT, and no task left behind.

A background task that fails ends the process with exit code 1: a supervisor restarts it, which is safer than running
on with a part missing. Periodic work instead logs its failure and tries again at its next turn.
"""

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager

import structlog
import uvloop

from roundhouse import telemetry
from roundhouse.environment import ServiceSettings
from roundhouse.errors import RoundhouseError

log = structlog.get_logger(__name__)

EXIT_CANNOT_START = 3
COLLECT_EVERY = 20_000  # net allocations; CPython's 700 has a busy process look for cycles many times a second


class Lifecycle:
    """Owner of the background tasks of one process."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._group = tasks
        self._tasks: list[asyncio.Task[None]] = []
        self.stopping = asyncio.Event()

    def spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        """Run `work` until it ends or the process stops; its failure stops the process."""
        self._tasks.append(self._group.create_task(work, name=name))

    def every(self, interval_ms: int, turn: Callable[[], Awaitable[None]], name: str) -> None:
        """Run `turn` again and again, `interval_ms` apart; a failed turn is logged and does not end the series."""
        self.spawn(self._repeat(interval_ms, turn, name), name)

    async def _repeat(self, interval_ms: int, turn: Callable[[], Awaitable[None]], name: str) -> None:
        while True:
            try:
                await turn()
            except Exception as error:  # noqa: BLE001 - the next turn is the recovery
                log.warning("periodic_work_failed", work=name, error=type(error).__name__, text=str(error))
            await asyncio.sleep(interval_ms / 1000)  # the period itself, not a wait for an event

    def stop(self) -> None:
        """Begin to drain. Idempotent."""
        self.stopping.set()

    def cancel_tasks(self) -> None:
        """End all background tasks."""
        for task in self._tasks:
            task.cancel()


Application = Callable[[Lifecycle], AbstractAsyncContextManager[None]]
"""Entering starts the service; leaving drains it, while background tasks still run."""


def run(service: str, settings: ServiceSettings, application: Application) -> None:
    """Run a service until it is told to stop. Exit 0 after a clean drain, 3 if it could not start, 1 on a crash."""
    telemetry.configure(service, settings)
    try:
        uvloop.run(_main(service, settings, application))
    except* RoundhouseError as group:
        for error in _leaves(group):
            log.error("service_failed", text=str(error))
            sys.stderr.write(f"{service}: {error}\n")
        sys.exit(EXIT_CANNOT_START)
    finally:
        telemetry.shutdown()


def _leaves(group: BaseExceptionGroup[RoundhouseError]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


def _keep_what_stays() -> None:
    """Take what was made at the start out of the search for cycles, and search less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])


async def _main(service: str, settings: ServiceSettings, application: Application) -> None:
    async with asyncio.TaskGroup() as tasks:
        lifecycle = Lifecycle(tasks)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.stop)
        async with application(lifecycle):
            _keep_what_stays()
            log.info("service_started")
            await lifecycle.stopping.wait()
            log.info("service_draining", seconds_max=settings.drain_seconds)
        lifecycle.cancel_tasks()
    log.info("service_stopped")

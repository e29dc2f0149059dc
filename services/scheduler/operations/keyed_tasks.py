"""Background work of which there is at most one for each key: an instance that is to leave, a node's list of blocks.

Invariant: whoever begins a key that is under way begins nothing, so callers need not hold anything between looking and
beginning. A failure is logged; whoever wanted the work finds it undone at its next look, and begins it again.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

Key = TypeVar("Key", bound=Hashable)


class KeyedTasks(Generic[Key]):
    """The tasks of one kind, in one process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether its work is under way."""
        return key in self._tasks

    def begin(self, key: Key, work: Callable[[], Coroutine[object, object, None]]) -> bool:
        """Begin `work` unless the key has some under way; whether it was begun."""
        if key in self._tasks:
            return False
        task = self._tasks[key] = asyncio.create_task(self._run(work), name=self._name)
        task.add_done_callback(lambda _: self._tasks.pop(key))
        return True

    async def _run(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - nobody awaits this task; the next look is the recovery
            log.warning("background_work_failed", work=self._name, error=type(error).__name__, text=str(error))

    async def stop(self) -> None:
        """Cancel what is under way and wait for its end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

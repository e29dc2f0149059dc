"""Finishing writes that a cancelled caller must not cut short."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def finished_anyway(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    `work` must be bounded by itself: this waits for it however long it takes."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - raised below, from the task itself
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is what the caller hears of
        raise cancelled
    return task.result()

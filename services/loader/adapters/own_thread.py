"""Threads for work that may wait long: for its turn, for a source that does not answer, for pages of a slow disk.

The event loop lends threads from a small pool (four and the number of cores). Work that waits there keeps short work
from its turn, and paused copies would keep the one that they wait for from beginning. So each has a thread of its own,
which ends with it; who begins such work bounds how much of it there is.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_own_thread(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> "asyncio.Future[Result]":
    """Do blocking work beside the event loop. Cancelling the future does not stop it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=getattr(work, "__name__", "work"))
    running = asyncio.wrap_future(pool.submit(work, *arguments, **named))
    pool.shutdown(wait=False)  # it ends when the work does
    return running

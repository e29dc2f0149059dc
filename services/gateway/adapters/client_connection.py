"""The client's side of one answer: sending with a limit on patience, and noticing that the client has left."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from roundhouse.http_server import DEPARTURE

STALL_S_MAX = 30.0  # a client that reads nothing for so long has left (case B32 b); its slot goes to others
LAST_WORDS_S_MAX = 1.0  # for the error event of a stream whose deadline has passed already


class Sender:
    """Sends one answer. `started` says whether its header is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._sent = 0
        self._sending = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the header."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body. Waits while the client does not read; `while_connected` bounds that."""
        self._sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending = False
        self._sent += 1

    async def last_words(self, data: bytes) -> None:
        """End the body with a piece that a client who does not read may miss."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S_MAX):
                await self.body(data, more=False)

    @property
    def stuck_at(self) -> int | None:
        """The number of the piece that is being sent now; None between pieces."""
        return self._sent if self._sending else None


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, None], sender: Sender, scope: Scope | None = None
) -> None:
    """Run `work`; when the client leaves, or reads nothing for `STALL_S_MAX`, cancel it and wait for its clean-up.

    The request's body must have been read. A server that tells of departures by `scope` spares a task.
    Raises what `work` raises; a departure of the client is no error here."""
    task = asyncio.current_task()
    assert task is not None
    departure = _Departure(task, sender)
    stop = departure.watch(receive, (scope or {}).get("extensions", {}).get(DEPARTURE))
    try:
        await work
    except asyncio.CancelledError:
        if not departure.happened or task.uncancel() > 0:
            raise  # somebody else cancelled us, too
    finally:
        stop()


class _Departure:
    """Cancels a task when its client leaves, or is stuck on one piece for `STALL_S_MAX` (at most twice that)."""

    def __init__(self, task: "asyncio.Task[Any]", sender: Sender) -> None:
        self._task = task
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self.happened = False
        self._timer = self._loop.call_later(STALL_S_MAX, self._look, None)

    def watch(self, receive: Receive, tell: Callable[[Callable[[], None] | None], bool] | None) -> Callable[[], None]:
        """Begin; returns what ends it."""
        if tell is None:
            return self._watch_by_task(receive)
        if not tell(self._leave):
            self._leave()

        def stop() -> None:
            tell(None)
            self._timer.cancel()

        return stop

    def _watch_by_task(self, receive: Receive) -> Callable[[], None]:
        watcher = asyncio.create_task(self._wait_for(receive))

        def stop() -> None:
            watcher.cancel()
            self._timer.cancel()

        return stop

    async def _wait_for(self, receive: Receive) -> None:
        await _disconnected(receive)
        self._leave()

    def _look(self, stuck_at: int | None) -> None:
        if stuck_at is not None and self._sender.stuck_at == stuck_at:
            self._leave()
        else:
            self._timer = self._loop.call_later(STALL_S_MAX, self._look, self._sender.stuck_at)

    def _leave(self) -> None:
        self._timer.cancel()
        if not self.happened:
            self.happened = True
            self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

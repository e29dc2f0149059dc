"""The client's side of one answer: sending with a limit on patience, and noticing that the client has left."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Send

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


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None], sender: Sender) -> None:
    """Run `work`; when the client leaves, or reads nothing for `STALL_S_MAX`, cancel it and wait for its clean-up.

    The request's body must have been read. Raises what `work` raises; a departure of the client is no error here."""
    task = asyncio.current_task()
    assert task is not None
    departure = _Departure(task)
    watcher = asyncio.create_task(departure.watch(receive, sender))
    try:
        await work
    except asyncio.CancelledError:
        if not departure.happened or task.uncancel() > 0:
            raise  # somebody else cancelled us, too
    finally:
        watcher.cancel()


class _Departure:
    """Cancels a task when its client leaves."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle
        self.happened = False

    async def watch(self, receive: Receive, sender: Sender) -> None:
        """Until the client has left, or has been stuck on one piece for `STALL_S_MAX` (at most twice that)."""
        self._look_again(sender, None)
        try:
            await _disconnected(receive)
        finally:
            self._timer.cancel()
        self._leave()

    def _look_again(self, sender: Sender, stuck_at: int | None) -> None:
        self._timer = self._loop.call_later(STALL_S_MAX, self._look, sender, stuck_at)

    def _look(self, sender: Sender, stuck_at: int | None) -> None:
        if stuck_at is not None and sender.stuck_at == stuck_at:
            self._leave()
        else:
            self._look_again(sender, sender.stuck_at)

    def _leave(self) -> None:
        if not self.happened:
            self.happened = True
            self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

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
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await _until_over(task, watcher, sender)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _until_over(task: "asyncio.Task[None]", watcher: "asyncio.Task[None]", sender: Sender) -> None:
    """Return when either is done, or when one piece has been stuck for `STALL_S_MAX` (at most twice that)."""
    stuck_at: int | None = None
    while True:
        done, _ = await asyncio.wait((task, watcher), timeout=STALL_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        if done or (stuck_at is not None and sender.stuck_at == stuck_at):
            return
        stuck_at = sender.stuck_at


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

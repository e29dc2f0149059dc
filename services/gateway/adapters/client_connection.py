"""The client's side of one answer: sending with a limit on patience, and noticing that the client has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Send

from services.gateway.domain.outcomes import ClientLeft

STALL_S_MAX = 30.0  # a client that reads nothing for so long has left (case B32 b); its slot goes to others
LAST_WORDS_S_MAX = 1.0  # for the error event of a stream whose deadline has passed already


class Sender:
    """Sends one answer. `started` says whether its header is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the header."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body. Raises ClientLeft when the client does not read for `STALL_S_MAX`."""
        await self._within(STALL_S_MAX, data, more)

    async def last_words(self, data: bytes) -> None:
        """End the body with a piece that a client who does not read may miss."""
        try:
            await self._within(LAST_WORDS_S_MAX, data, False)
        except ClientLeft:
            return

    async def _within(self, seconds: float, data: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(seconds) as scope:
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ClientLeft from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; when the client disconnects first, cancel it and wait until it has cleaned up.

    The request's body must have been read. Raises what `work` raises; a departure of the client is no error here."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""One gRPC call on a `NodeConnection`: its answers as they come, within a bounded window, and its end.

Invariant: unread answers are bounded by the window, so a slow reader slows the node down and nothing else.
"""

import asyncio
from typing import Protocol

from services.gateway.adapters import http2_frames as h2

WINDOW_BYTES = 256 * 1024  # unread answers of one call; some 500 tokens, or an embedding as it comes
ANSWER_BYTES_MAX = 64 * 1024 * 1024  # one message, as everywhere in the mesh (`grpc_edge`)

OK, CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE = 0, 1, 2, 4, 13, 14


class Carrier(Protocol):
    """What a call needs of its connection."""

    def write(self, data: bytes) -> None:
        """Send frames."""
        ...

    def forget(self, call: "Call", *, cancel: bool = False) -> None:
        """The call is over; with `cancel` the node is told."""
        ...


class CallFailed(Exception):
    """A call ended with a status other than OK, or the connection did."""

    def __init__(self, status: int, details: str = "") -> None:
        super().__init__(f"gRPC status {status}: {details}")
        self.status = status
        self.details = details


class Call:
    """One call. `read` until it gives nothing more; `cancel` if it is not read to its end. One reader."""

    def __init__(self, connection: "Carrier", request: bytes, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.stream = 0
        self.tries = 0
        self.unsent = memoryview(request)
        self.send_window = 0
        self._request = request
        self._connection = connection
        self._ends_at = loop.time() + timeout_s
        # Ends it as DEADLINE_EXCEEDED, whatever the node does.
        self._timer = loop.call_later(timeout_s, self._expire)
        self._messages: list[bytes] = []
        self._partial = bytearray()
        self._unread_bytes = 0
        self._owed_bytes = 0  # received, but not yet given back to the node's window
        self._ended = False
        self._failure: CallFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended

    @property
    def remaining_s(self) -> float:
        """Until its deadline."""
        return self._ends_at - asyncio.get_running_loop().time()

    def begin(self, stream: int, send_window: int) -> None:
        """It is sent, from the beginning, as this stream."""
        self.stream, self.send_window = stream, send_window
        self.tries += 1
        self.unsent = memoryview(self._request)

    async def read(self) -> list[bytes]:
        """The messages that have come, at least one; none when the call has ended well. Raises CallFailed.

        Cancelling the wait loses nothing; it does not cancel the call."""
        while not self._messages:
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        messages, self._messages = self._messages, []
        self._unread_bytes = 0
        self._give_back()
        return messages

    def cancel(self) -> None:
        """End it on the node, unless it has ended. Idempotent."""
        if not self._ended:
            self.end(CallFailed(CANCELLED))
            self._connection.forget(self, cancel=True)

    def _expire(self) -> None:
        if not self._ended:
            self.end(CallFailed(DEADLINE_EXCEEDED))
            self._connection.forget(self, cancel=True)

    def take(self, data: bytes) -> None:
        """A piece of the answer. Raises ValueError for what is no gRPC message."""
        self._owed_bytes += len(data)
        if self._partial:
            self._partial += data
            rest: bytes | bytearray = self._partial
        else:
            rest = data
        at, size = 0, len(rest)
        while size - at >= h2.MESSAGE_HEAD_BYTES:
            compressed, length = h2.message_head(rest, at)
            if compressed or length > ANSWER_BYTES_MAX:
                raise ValueError("an answer is compressed or too long")
            end = at + h2.MESSAGE_HEAD_BYTES + length
            if end > size:
                break
            self._messages.append(bytes(rest[at + h2.MESSAGE_HEAD_BYTES : end]))
            self._unread_bytes += end - at
            at = end
        self._partial = bytearray(rest[at:])
        self._give_back()

    def _give_back(self) -> None:
        """Let the node send more, once half of the window has been read. An unfinished message counts as read."""
        free = self._owed_bytes - self._unread_bytes
        if free >= WINDOW_BYTES // 2 and not self._ended:
            self._owed_bytes -= free
            self._connection.write(h2.window_update(self.stream, free))

    def end(self, failure: CallFailed | None) -> None:
        """Nothing more comes. The first end counts."""
        if self._ended:
            return
        self._ended, self._failure = True, failure
        self._timer.cancel()
        self.wake()

    def wake(self) -> None:
        """Let the reader see what there is."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

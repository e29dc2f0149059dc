"""Closed-loop HTTP load on an OpenAI-compatible server, from one process and with little of it.

The client is a protocol on bare sockets: it beats an HTTP library by an order of magnitude, so that on few cores the
servers get the time. It reads answers as far as it must: where they end, and when the first token came.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import cast

from benchmarks.streams import Load, Stream, closed_loop

STREAM_END = b"0\r\n\r\n"
FIRST_TOKEN = b'"content":"tok'


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to ask it."""

    name: str
    port: int
    key: str
    model: str
    max_tokens: int

    def request(self, *, stream: bool) -> bytes:
        """The bytes of one request."""
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": "hello there"}],
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "stream": stream,
            }
        ).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\naccept: */*\r\nuser-agent: roundhouse-benchmarks\r\n"
            b"x-request-deadline-ms: 3600000\r\n"  # idle streams are to be held as long as it takes
            b"content-length: %d\r\n\r\n%b" % (self.port, self.key.encode(), len(body), body)
        )


class Caller(asyncio.Protocol):
    """One kept connection; `call` sends a request and waits for the end of its answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces = bytearray()
        self._first = 0.0
        self._stream = False
        self._end = -1
        self._done: asyncio.Future[None] | None = None
        self.begun: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    async def call(self, request: bytes, *, stream: bool) -> Stream:
        """One request. Raises AssertionError if it is refused or ends early."""
        assert self._transport is not None
        self._pieces.clear()
        self._first, self._stream, self._end = 0.0, stream, -1
        self._done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._transport.write(request)
        await self._done
        total = time.perf_counter() - began
        data = bytes(self._pieces)
        assert data.startswith(b"HTTP/1.1 200"), data[:600]
        tokens = data.count(FIRST_TOKEN) if stream else 0
        if stream:
            assert b"data: [DONE]" in data, data[-600:]
        return Stream(((self._first or time.perf_counter()) - began) * 1000, total * 1000, tokens)

    def send(self, request: bytes) -> "asyncio.Future[None]":
        """Send a request whose answer never ends; the result is done at its first bytes."""
        assert self._transport is not None
        self._stream = True
        self.begun = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self.begun

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._pieces += data
        if self.begun is not None and not self.begun.done():
            self.begun.set_result(None)
        if self._done is None or self._done.done():
            return
        if not self._first and FIRST_TOKEN in data:
            self._first = time.perf_counter()
        if self._has_ended(data):
            self._done.set_result(None)

    def _has_ended(self, data: bytes) -> bool:
        if self._stream and self._pieces.startswith(b"HTTP/1.1 200"):
            return self._pieces.endswith(STREAM_END)
        if self._end < 0:
            head_end = self._pieces.find(b"\r\n\r\n")
            if head_end < 0:
                return False
            head = bytes(self._pieces[:head_end]).lower()
            if b"content-length:" not in head:
                return self._pieces.endswith(STREAM_END)
            self._end = head_end + 4 + int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return len(self._pieces) >= self._end

    def connection_lost(self, exc: Exception | None) -> None:
        """A call that runs fails."""
        for waiting in (self._done, self.begun):
            if waiting is not None and not waiting.done():
                waiting.set_exception(exc or ConnectionError("the server hung up"))

    @property
    def is_open(self) -> bool:
        """Whether the server has not hung up."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


async def open_callers(port: int, count: int) -> list[Caller]:
    """`count` connections."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Caller, "127.0.0.1", port))[1] for _ in range(count)]


async def http_load(target: Target, *, callers: int, requests: int, stream: bool) -> Load:
    """`callers` kept connections that each send the next request when the last answer ended."""
    idle = await open_callers(target.port, callers)
    everyone = list(idle)
    request = target.request(stream=stream)

    async def one() -> Stream:
        caller = idle.pop()
        try:
            return await caller.call(request, stream=stream)
        finally:
            idle.append(caller)

    try:
        return await closed_loop(one, callers=callers, requests=requests)
    finally:
        for caller in everyone:
            caller.close()

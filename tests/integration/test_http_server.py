"""A client's departure reaches the request that runs, whatever was on its connection before and however it is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from roundhouse.http_server import serve_http
from services.gateway.adapters.client_connection import Sender, while_connected

WITHIN_S = 30  # at once in fact; without a notice it would be never


class Slow:
    """An application whose path `/first` answers and then takes its time, and whose other paths never answer."""

    def __init__(self, *, by_receive: bool = False) -> None:
        self.by_receive = by_receive
        self.begun = 0
        self.answered, self.running, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = Sender(send)
        await Request(scope, receive).body()
        work = self._first(sender) if scope["path"] == "/first" else self._endless()
        await while_connected(receive, work, sender, None if self.by_receive else scope)

    async def _first(self, sender: Sender) -> None:
        await sender.start(200, [(b"content-length", b"2")])
        await sender.body(b"ok", more=False)
        await self.may_end.wait()  # as a settlement that nobody waits for
        self.answered.set()

    async def _endless(self) -> None:
        self.begun += 1
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@asynccontextmanager
async def connected(app: Slow) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the served application."""
    async with serve_http(app, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            app.may_end.set()
            writer.close()


def post(path: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of a request."""
    return b"POST %s HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)), body


async def leave(app: Slow, writer: asyncio.StreamWriter) -> None:
    """Hang up and wait until the endless request has been cancelled."""
    async with asyncio.timeout(WITHIN_S):
        await app.running.wait()
        writer.close()
        await app.cancelled.wait()


async def test_a_request_that_ends_late_does_not_hide_the_departure_of_the_next() -> None:
    """The answer of the first request is out, its end is not; the client asks again on the same connection, the first
    ends, the client leaves: the second is cancelled. (Settlements end after the last byte of an answer.)"""
    app = Slow()
    async with connected(app) as (reader, writer):
        writer.write(b"".join(post("/first")))
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.write(b"".join(post("/endless")))
        async with asyncio.timeout(WITHIN_S):
            await app.running.wait()
            app.may_end.set()
            await app.answered.wait()
        await leave(app, writer)


async def test_the_departure_behind_a_long_body_is_noticed() -> None:
    """A body of 200 kB that comes after its head stops the server's reading while it is taken; the client leaves."""
    app = Slow()
    async with connected(app) as (_, writer):
        head, body = post("/endless", b"x" * 200_000)
        writer.write(head)
        await writer.drain()
        await asyncio.sleep(0.05)  # until the application waits for the body
        writer.write(body)
        await writer.drain()
        await leave(app, writer)


@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("at_once", [True, False])
async def test_the_departure_of_a_client_that_asked_ahead_is_noticed(more: int, at_once: bool) -> None:
    """More requests wait behind the one that runs (pipelining), sent with it or later; the client leaves: it is
    cancelled, and the others never run."""
    app = Slow()
    async with connected(app) as (_, writer):
        writer.write(b"".join(post("/endless")) * (1 + more if at_once else 1))
        async with asyncio.timeout(WITHIN_S):
            await app.running.wait()
        app.running.clear()
        if not at_once:
            writer.write(b"".join(post("/endless")) * more)
            await asyncio.sleep(0.05)  # until the server has them
        app.running.set()
        await leave(app, writer)
        assert app.begun == 1


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    """Three requests in one packet: three answers, one after the other."""
    app = Slow()
    app.may_end.set()
    async with connected(app) as (reader, writer):
        writer.write(b"".join(post("/first")) * 3)
        async with asyncio.timeout(WITHIN_S):
            for _ in range(3):
                assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")


async def test_a_request_waiting_for_a_body_hears_of_the_departure_with_others_behind() -> None:
    """By `receive` as ASGI has it, too: the one that runs is told, not only the last one that came."""
    app = Slow(by_receive=True)
    async with connected(app) as (_, writer):
        writer.write(b"".join(post("/endless")) * 2)
        await leave(app, writer)

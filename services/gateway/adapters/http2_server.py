"""HTTP/2 for clients, on a port of its own: granian in this process's event loop, over the same application.

HTTP/1.1 stays with uvicorn, which costs less for each request here (docs/decisions/0097-http-servers.md). Without TLS
it is HTTP/2 with prior knowledge, as balancers speak it to their backends; with TLS it is negotiated (ALPN).
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP2Settings
from granian.server.embed import Server
from starlette.types import ASGIApp

from roundhouse.errors import Unavailable
from roundhouse.http_server import HEAD_BYTES_MAX, TlsFiles

START_S = 10.0  # its threads are up within milliseconds
STREAMS_MAX = 1_000  # of one connection; a balancer may bring all its clients on a few
KEEP_ALIVE_MS = 20_000  # a ping to a silent client; without an answer for as long it has left


@asynccontextmanager
async def serve_http2(
    app: ASGIApp, host: str, port: int, *, drain_s: float, tls: TlsFiles | None = None, reuse_port: bool = False
) -> AsyncIterator[int]:
    """Serve while the context is open; yields the port (0 picks a free one). Leaving lets open answers end, bounded.

    Raises Unavailable if the port is taken."""
    bound = _checked_port(host, port, reuse_port=reuse_port)
    running = _Running(app)
    server = Server(
        running,
        address=host,
        port=bound,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http2,
        websockets=False,
        log_enabled=False,
        http2_settings=HTTP2Settings(
            keep_alive_interval=KEEP_ALIVE_MS,
            keep_alive_timeout=KEEP_ALIVE_MS // 1000,
            max_concurrent_streams=STREAMS_MAX,
            max_headers_size=HEAD_BYTES_MAX,
        ),
        ssl_cert=tls.certificate if tls else None,
        ssl_key=tls.key if tls else None,
        ssl_protocol_min=SSLProtocols.tls12,
        ssl_ca=tls.client_ca if tls else None,
        ssl_client_verify=tls is not None and tls.client_ca is not None,
    )
    task = asyncio.create_task(server.serve(), name="http2_server")
    try:
        await _wait_listening(host, bound, task)
        yield bound
    finally:
        await running.drain(drain_s)
        server.stop()  # type: ignore[no-untyped-call]
        await task


class _Running:
    """The application, with the answers that are open, so that a drain can wait for them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        if self._draining:
            await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"1")]})
            await send({"type": "http.response.body", "body": b""})
            return
        self._open += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Take nothing new and wait for what is open."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return


def _checked_port(host: str, port: int, *, reuse_port: bool) -> int:
    """The port, if it is free; granian itself would only log that it is not."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
        return int(probe.getsockname()[1])


async def _wait_listening(host: str, port: int, server: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(START_S):
        while True:
            if server.done():
                server.result()
                raise Unavailable(f"the HTTP/2 server on {host}:{port} ended")
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(0.02)  # there is no event: it listens in a thread of its own
                continue
            writer.close()
            return

"""The HTTP server of a process: uvicorn on a port of its own, with limits that uvicorn does not have, and TLS.

A connection that does not finish a request's head in time, or makes it too long, is closed: neither holds memory nor a
place (slow loris). With files of a certificate it speaks TLS, with a CA file it wants a certificate of its clients too.
Invariant: leaving stops accepting and lets open answers end. Decision: docs/decisions/0090-http-edge.md.
"""

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roundhouse.errors import InvalidInput, Unavailable

HEAD_BYTES_MAX = 64 * 1024  # request line and headers together; 431 above it
HEAD_S = 10.0  # a guess: a head fits into one packet
KEEP_ALIVE_S = 75.0  # as nginx; clients and balancers keep connections for about a minute
BACKLOG = 1_024
DEPARTURE = "roundhouse.departure"
"""ASGI extension: a function that takes what to call when the client of this request leaves, or None to hear no more;
it returns False if the client has left already. Cheaper than a task that waits for `http.disconnect`. It belongs to its
request: what an earlier one on the same connection says afterwards does not touch it."""
AHEAD_MAX = 8  # requests that wait behind the one that runs while its client is still listened to; a guess
GATHERED_BYTES_MAX = 64 * 1024  # asyncio's own high-water mark of a transport
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` clients must show a certificate that one of its CAs signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @staticmethod
    def of(certificate: str, key: str, client_ca: str) -> "TlsFiles | None":
        """From settings; None when nothing is set. Raises InvalidInput for half of it, or a file that is not there."""
        if not (certificate or key or client_ca):
            return None
        if not (certificate and key):
            raise InvalidInput("TLS needs both a certificate and its key")
        files = TlsFiles(Path(certificate), Path(key), Path(client_ca) if client_ca else None)
        for file in (files.certificate, files.key, files.client_ca):
            if file is not None and not file.is_file():
                raise InvalidInput(f"the TLS file {file} is not there")
        return files

    def uvicorn_options(self) -> dict[str, Any]:
        """As uvicorn takes them."""
        wanted = ssl.CERT_NONE if self.client_ca is None else ssl.CERT_REQUIRED
        return {
            "ssl_certfile": str(self.certificate),
            "ssl_keyfile": str(self.key),
            "ssl_ca_certs": str(self.client_ca) if self.client_ca else None,
            "ssl_cert_reqs": wanted,
        }


@asynccontextmanager
async def serve_http(
    app: object,
    host: str,
    port: int,
    *,
    drain_s: float = 5.0,
    tls: TlsFiles | None = None,
    head_s: float = HEAD_S,
    reuse_port: bool = False,
) -> AsyncIterator[int]:
    """Serve an ASGI app while the context is open; yields the port (0 picks a free one).

    Leaving stops accepting and waits up to `drain_s` for open responses. With `reuse_port` other processes may serve
    the same port. Raises Unavailable if the port is taken."""
    listener = _listen(host, port, reuse_port=reuse_port)

    class Protocol(GuardedProtocol):
        """With the head's time limit of this server."""

        head_timeout_s = head_s

    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI callable
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        backlog=BACKLOG,
        timeout_keep_alive=round(KEEP_ALIVE_S),
        proxy_headers=False,  # nothing here believes what a client says of its address
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        **(tls.uvicorn_options() if tls is not None else {}),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task
        listener.close()


class GatheredWrites:
    """A transport that sends what is written in one turn of the loop at once: a head and its body, several pieces.

    A write is a system call that wakes the reader; uvicorn makes one for the head and one for each piece. Everything
    else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        # What uvicorn calls for every request, without a detour.
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        """Send soon; at once if much waits, so that the transport can tell the writer to pause."""
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > GATHERED_BYTES_MAX:
            self._send()

    def _send(self) -> None:
        if self._unsent:
            unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
            if self._transport.is_closing():
                return  # the client has left since; a loop may raise for a write now
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def close(self) -> None:
        """Close when everything is sent."""
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        self._send()  # whoever looks behind must find what was written
        return getattr(self._transport, name)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a limit on the time and the length of a request's head."""

    head_timeout_s = HEAD_S
    _head_timer: asyncio.TimerHandle | None = None
    _on_departure: Callable[[], None] | None = None
    _watcher: RequestResponseCycle | None = None  # whose `_on_departure` is
    _running: RequestResponseCycle | None = None  # `cycle` is the last one that came
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """A new client has as long as any for its first request's head."""
        super().connection_made(cast("asyncio.Transport", GatheredWrites(transport, self.loop)))
        self._begin_head()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        extensions = cast("dict[str, Any]", self.scope.setdefault("extensions", {}))
        extensions[DEPARTURE] = functools.partial(self._tell_departure, self.cycle)
        if 0 < len(self.pipeline) <= AHEAD_MAX:
            self.flow.resume_reading()  # uvicorn stops; then nothing tells that the client has left

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _tell_departure(self, cycle: RequestResponseCycle, told: Callable[[], None] | None) -> bool:
        if told is not None:
            self._watcher, self._on_departure = cycle, told
            if self.parser is not None:
                self.flow.resume_reading()  # it stops for a long body, and only uvicorn's `receive` would go on
        elif self._watcher is cycle:
            self._watcher = self._on_departure = None
        return self.parser is not None  # uvicorn's sign that the connection is there

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_timer()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn tells only the last one that came
            running.disconnected = True
            running.message_event.set()
        told, self._on_departure, self._watcher = self._on_departure, None, None
        if told is not None:
            told()

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `lifecycle` owns the signals."""

    def install_signal_handlers(self) -> None:
        """Nothing to install."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve without capturing signals."""
        await self._serve(sockets)


def _listen(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener

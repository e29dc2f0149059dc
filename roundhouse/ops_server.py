"""Health, readiness and metrics of a process, on a port of their own, the same in every service.

`/health/live` is 200 while the event loop turns; `/health/ready` is 200 only while every condition holds, else 503 with
the reasons (case B48); `/metrics` is the Prometheus page.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roundhouse import telemetry
from roundhouse.errors import Unavailable


class Readiness:
    """Named conditions of one process; ready while all hold."""

    def __init__(self, *conditions: str) -> None:
        self._reasons: dict[str, str] = dict.fromkeys(conditions, "starting")

    def set(self, condition: str, *, reason: str | None) -> None:
        """Record that a condition holds (`reason` None) or why it does not."""
        self._reasons[condition] = reason or ""

    @property
    def ready(self) -> bool:
        """Whether every condition holds."""
        return not any(self._reasons.values())

    def report(self) -> dict[str, str]:
        """Condition → "ok" or the reason it does not hold."""
        return {name: reason or "ok" for name, reason in self._reasons.items()}


def health_routes(readiness: Readiness) -> list[Route]:
    """Routes for /health/live, /health/ready and /metrics."""

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        body = {"ready": readiness.ready, "conditions": readiness.report()}
        return JSONResponse(body, status_code=200 if readiness.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(telemetry.REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return [Route("/health/live", live), Route("/health/ready", ready), Route("/metrics", metrics)]


@asynccontextmanager
async def serve_ops(readiness: Readiness, host: str, port: int) -> AsyncIterator[int]:
    """Serve the health routes while the context is open; yields the port."""
    app = Starlette(routes=health_routes(readiness))
    async with serve_http(app, host, port) as bound:
        yield bound


@asynccontextmanager
async def serve_http(app: object, host: str, port: int, *, drain_s: float = 5.0) -> AsyncIterator[int]:
    """Serve an ASGI app while the context is open; yields the port (0 picks a free one).

    Leaving stops accepting and waits up to `drain_s` for open responses. Raises Unavailable if the port is taken."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI callable
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        proxy_headers=False,  # nothing here believes what a client says of its address
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `lifecycle` owns the signals."""

    def install_signal_handlers(self) -> None:
        """Nothing to install."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve without capturing signals."""
        await self._serve(sockets)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener

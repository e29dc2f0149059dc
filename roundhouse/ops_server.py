"""Health, readiness and metrics of a process, on a port of their own, the same in every service.

`/health/live` is 200 while the event loop turns; `/health/ready` is 200 only while every condition holds, else 503 with
the reasons (case B48); `/metrics` is the Prometheus page.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roundhouse import telemetry
from roundhouse.http_server import serve_http


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

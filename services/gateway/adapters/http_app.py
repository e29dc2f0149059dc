"""The gateway's public HTTP application: guarded routes, and the two health paths that need no key."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from roundhouse.ops_server import Readiness
from services.gateway.adapters.http_edge import EdgeRoute, HttpEdge, Identify, router


def public_app(routes: Sequence[BaseRoute], readiness: Readiness, identify: Identify) -> ASGIApp:
    """The application. Everything but the health paths needs a key."""
    return HttpEdge(router([*health_routes(readiness), *routes]), identify)


def health_routes(readiness: Readiness) -> list[BaseRoute]:
    """The public set: liveness and readiness, without reasons, which are for operators on the ops port."""

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        return JSONResponse({"ready": readiness.ready}, status_code=200 if readiness.ready else 503)

    return [EdgeRoute("/health/live", live), EdgeRoute("/health/ready", ready)]

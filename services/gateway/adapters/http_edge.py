"""The outermost layer of the gateway's HTTP server: nobody passes without a key.

Everything but an exact path of the public set needs a key, whatever the spelling and whether or not a route exists
(case B05). The layer also gives each request its id, its server span, its access line and its error shape. Bodies,
prompts and keys are never logged (invariant 16); labels come from the route table, not from callers (invariant 17).
"""

import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from inspect import iscoroutinefunction
from typing import Any

import structlog
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roundhouse import telemetry
from roundhouse.errors import RoundhouseError, Unauthenticated
from services.gateway.adapters.http_errors import NoSuchRoute, WrongMethod, error_response, internal_error
from services.gateway.adapters.request_ids import new_request_id
from services.gateway.domain.outcomes import STATUS_CLIENT_LEFT, ClientLeft
from services.gateway.ports import Caller

log = structlog.get_logger(__name__)

CLIENT_ID_ATTRIBUTE = "http.request.header.x-request-id"  # OpenTelemetry semantic conventions, HTTP
CLIENT_ID_CHARACTERS_MAX = 128  # a guess: longer than any id

PUBLIC_PATHS = frozenset({"/health/live", "/health/ready"})
PUBLIC_METHODS = frozenset({"GET", "HEAD"})
REQUEST_ID_HEADER = "x-request-id"

Identify = Callable[[str], Awaitable[Caller]]
_State = MutableMapping[str, Any]


class HttpEdge:
    """ASGI layer around the routes. Puts `caller` and `request_id` into the request's state."""

    def __init__(self, routes: ASGIApp, identify: Identify) -> None:
        self._routes = routes
        self._identify = identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event; anything but HTTP is refused."""
        if scope["type"] != "http":
            assert scope["type"] == "websocket", scope["type"]
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = new_request_id()
        headers = Headers(scope=scope)
        state: _State = scope.setdefault("state", {})
        state["request_id"] = request_id
        answer = _Answer(send, request_id)
        started = time.perf_counter()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        carrier = {"traceparent": headers["traceparent"]} if "traceparent" in headers else {}
        with telemetry.continued_span(scope["method"], carrier, SpanKind.SERVER) as span:
            await self._guarded(scope, receive, answer, headers)
            route = _route_of(scope)
            span.update_name(f"{scope['method']} {route}")
            span.set_attributes({"http.route": route, "http.response.status_code": answer.status})
            if "x-request-id" in headers:  # the caller's own: a label here, and nowhere else
                span.set_attribute(CLIENT_ID_ATTRIBUTE, headers["x-request-id"][:CLIENT_ID_CHARACTERS_MAX])
            if answer.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
        _access_line(scope, answer.status, started)

    async def _guarded(self, scope: Scope, receive: Receive, answer: "_Answer", headers: Headers) -> None:
        try:
            if not (scope["path"] in PUBLIC_PATHS and scope["method"] in PUBLIC_METHODS):
                scope["state"]["caller"] = await self._identify(key_text(headers))
            await self._routes(scope, receive, answer)
        except RoundhouseError as error:
            await self._answer_error(error, scope, receive, answer)
        except ClientLeft:
            return
        except Exception as error:  # noqa: BLE001 - the client hears that it was our fault
            log.error("request_handler_failed", route=_route_of(scope), **fault_fields(error))
            await self._answer_error(internal_error(), scope, receive, answer)

    async def _answer_error(self, error: RoundhouseError, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        if answer.status:
            return  # the header is out: whoever streams has told the client already
        await error_response(error, scope["path"])(scope, receive, answer)


class EdgeRoute(Route):
    """A route that tells the edge its pattern, and whose errors are ours."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose path matched. Raises WrongMethod, and what the endpoint raises: the edge answers it."""
        scope["state"]["route"] = self.path
        if self.methods and scope["method"] not in self.methods:
            raise WrongMethod(f"This path takes {', '.join(sorted(self.methods))}.")
        if not iscoroutinefunction(self.endpoint):
            await self.app(scope, receive, send)
            return
        answer: ASGIApp = await self.endpoint(Request(scope, receive, send))
        await answer(scope, receive, send)


def router(routes: Sequence[BaseRoute]) -> ASGIApp:
    """The routes as one application, without redirects to other spellings."""
    return _ExactFirst(routes, Router(routes, redirect_slashes=False, default=_no_such_route))


class _ExactFirst:
    """Finds routes without parameters by their path, all others by trying them in turn."""

    def __init__(self, routes: Sequence[BaseRoute], others: Router) -> None:
        exact = [route for route in routes if isinstance(route, EdgeRoute) and "{" not in route.path]
        paths = Counter(route.path for route in exact)
        self._exact = {route.path: route for route in exact if paths[route.path] == 1}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Raises NoSuchRoute, WrongMethod."""
        route = self._exact.get(scope["path"])
        if route is None:
            await self._others(scope, receive, send)
            return
        scope["path_params"] = {}
        scope["endpoint"] = route.endpoint
        await route.handle(scope, receive, send)


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise NoSuchRoute("There is nothing at this path.")


def fault_fields(error: BaseException) -> dict[str, str]:
    """What may be logged of a fault: its kind and place, not its text, which may quote a prompt (invariant 16)."""
    return {"error": type(error).__name__, "where": "".join(traceback.format_tb(error.__traceback__)[-6:])}


class _Answer:
    """`send`, with the request id on every answer and the status remembered."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = self._request_id
        await self._send(message)


def key_text(headers: Headers) -> str:
    """The key from `Authorization: Bearer`, `api-key` or `x-api-key`. Raises Unauthenticated if there is none."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    key = credentials.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get("api-key", "") or headers.get("x-api-key", "")
    if not key:
        raise Unauthenticated("No API key was given. Send it as 'Authorization: Bearer KEY'.")
    return key


def _route_of(scope: Scope) -> str:
    """The route's pattern; callers' own paths never become a name."""
    return str(scope.get("state", {}).get("route", "unknown"))


def _access_line(scope: Scope, status: int, started: float) -> None:
    caller: Caller | None = scope["state"].get("caller")
    log.info(
        "request",
        route=_route_of(scope),
        method=scope["method"] if scope["method"] in _METHODS else "OTHER",
        status=status or STATUS_CLIENT_LEFT,
        duration_ms=round((time.perf_counter() - started) * 1000),
        tenant_id=caller.tenant_id if caller else None,
        key_id=caller.key_id if caller else None,
    )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

"""What every answer carries and what no request may be: security headers, CORS where it was asked for, limits.

One ASGI layer before everything else, also before keys are looked at. CORS is off unless origins are named; then only
those are answered, and credentials are never allowed: keys travel in a header, not in a cookie.
Source: OWASP, HTTP Security Response Headers cheat sheet; Fetch standard, CORS protocol.
"""

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.adapters.http_errors import BodyTooSlow

HEADERS_MAX = 100  # a guess: several times what proxies and clients add
HEADER_BYTES_MAX = 32 * 1024  # of all headers; keys and traces need a few hundred

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
BODY_S = 30.0  # a guess: a body has so long, and
BODY_BYTES_PER_S = 16 * 1024  # a second more for each of these that has come: a slow line is no attack
_HSTS = (b"strict-transport-security", b"max-age=31536000")
_ALLOWED_METHODS = b"GET, POST, DELETE"
_ALLOWED_HEADERS = (
    b"authorization, content-type, api-key, x-api-key, x-request-deadline-ms, idempotency-key, traceparent"
)
_EXPOSED_HEADERS = (
    b"x-request-id, retry-after, retry-after-ms, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
PREFLIGHT_S = b"600"


class HttpLimits:
    """The layer. `origins` may call from browsers; `*` is every origin, none is CORS off."""

    def __init__(
        self, app: ASGIApp, *, origins: Sequence[str] = (), secure: bool = False, body_s: float = BODY_S
    ) -> None:
        self._app = app
        self._body_s = body_s
        self._origins = frozenset(origin.encode() for origin in origins)
        self._added = [*SECURITY_HEADERS, _HSTS] if secure else list(SECURITY_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what is too long, answer preflights, pass the rest on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > HEADERS_MAX or sum([len(name) + len(value) for name, value in headers]) > HEADER_BYTES_MAX:
            await _plain(send, 431, [*self._added])
            return
        cors = self._cors(headers) if self._origins else []
        if cors and scope["method"] == "OPTIONS" and _has(headers, b"access-control-request-method"):
            await _plain(send, 204, [*self._added, *cors, *_PREFLIGHT])
            return
        added = [*self._added, *cors]

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, _TimedBody(receive, self._body_s), with_headers)

    def _cors(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        origin = next((value for name, value in headers if name == b"origin"), b"")
        if not origin or not (origin in self._origins or b"*" in self._origins):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
        ]


class _TimedBody:
    """`receive` of one request, with a limit on how slowly its body may come."""

    __slots__ = ("_ends_at", "_received", "_whole")

    def __init__(self, receive: Receive, body_s: float) -> None:
        self._received = receive
        self._ends_at = asyncio.get_running_loop().time() + body_s
        self._whole = False

    async def __call__(self) -> Message:
        """The next event. Raises BodyTooSlow; after the body, waits for the client's departure without limit."""
        if self._whole:
            return await self._received()
        try:
            async with asyncio.timeout_at(self._ends_at):
                message = await self._received()
        except TimeoutError:
            raise BodyTooSlow("The body of the request comes too slowly.") from None
        self._whole = not message.get("more_body", False)
        self._ends_at += len(message.get("body", b"")) / BODY_BYTES_PER_S
        return message


_PREFLIGHT = [
    (b"access-control-allow-methods", _ALLOWED_METHODS),
    (b"access-control-allow-headers", _ALLOWED_HEADERS),
    (b"access-control-max-age", PREFLIGHT_S),
]


def _has(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bool:
    return any(name == wanted for name, _ in headers)


async def _plain(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    length = [] if status == 204 else [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": b""})

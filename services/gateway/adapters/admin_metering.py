"""Metering's own API behind the admin API: what operators may do there, and what a tenant may read of itself.

An admin key may call everything. A tenant's key (scope `usage:read`, or `inference`) may only read, only from the paths
below, and the tenant in the question is always its own, whatever was asked (invariant 16). Answers are streamed through
as they come, so that an export of any size passes. Nothing is retried: metering's writes are idempotent, callers may.
"""

import re
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import quote, urlencode

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from roundhouse.errors import Forbidden, NotFound, Unavailable
from services.gateway.adapters.http_requests import body_within
from services.gateway.domain import keys
from services.gateway.ports import Caller

TIMEOUT: Final = httpx.Timeout(300.0, connect=5.0)  # closing or rating again a month takes a while
BODY_BYTES_MAX: Final = 8 * 1024 * 1024  # as metering itself
_TENANT_PATHS: Final = re.compile(r"usage|statements/[0-9-]{1,10}|export/[0-9-]{1,10}")
_PATH: Final = re.compile(r"[A-Za-z0-9_=~.@ -]+(/[A-Za-z0-9_=~.@ -]+)*")
_PASSED_ON: Final = ("content-type", "content-disposition", "content-length")


class MeteringProxy:
    """Forwards `/admin/v1/metering/PATH` to `/v1/PATH` of metering. The client is the caller's to close."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def forward(self, request: Request, caller: Caller) -> Response:
        """One call. Raises Forbidden, NotFound, BodyTooLarge, Unavailable."""
        path = request.path_params["path"]
        if _PATH.fullmatch(path) is None or ".." in path:
            raise NotFound("There is nothing at this path.", code="not_found")
        parameters = allowed_parameters(request, caller, path)
        body = await body_within(request, BODY_BYTES_MAX)
        try:
            built = self._client.build_request(
                request.method,
                f"/v1/{quote(path)}",
                params=urlencode(parameters),
                content=body,
                timeout=TIMEOUT,
            )
            answer = await self._client.send(built, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable("metering does not answer now") from error
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        return StreamingResponse(_body(answer), status_code=answer.status_code, headers=headers)


def allowed_parameters(request: Request, caller: Caller, path: str) -> list[tuple[str, str]]:
    """The query as this caller may ask it. Raises Forbidden."""
    given = list(request.query_params.multi_items())
    if keys.ADMIN in caller.scopes:
        return given
    if not caller.scopes & {keys.USAGE_READ, keys.INFERENCE}:
        raise Forbidden("This key may not read usage.")
    if request.method not in ("GET", "HEAD") or _TENANT_PATHS.fullmatch(path) is None:
        raise Forbidden("This needs an admin key.")
    if any(value != caller.tenant_id for name, value in given if name == "tenant"):
        raise Forbidden("This key may read its own tenant's usage only.", param="tenant")
    return [(name, value) for name, value in given if name != "tenant"] + [("tenant", caller.tenant_id)]


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()

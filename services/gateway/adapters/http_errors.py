"""Errors as HTTP: the OpenAI error object under /v1, `{"error": text}` under /v2, and the headers that clients act on.

Source of the shapes: docs/decisions/0005-errors.md and the OpenAI and KServe v2 references. `Retry-After` has whole
seconds, at least 1; `retry-after-ms` is what the official client prefers.
"""

import math

import msgspec
from starlette.responses import Response

from roundhouse.errors import BudgetExhausted, InvalidInput, NotFound, RoundhouseError, error_shape

_encode = msgspec.json.Encoder().encode


class BodyTooLarge(InvalidInput):
    """The body is longer than this gateway takes."""


class BodyTooSlow(InvalidInput):
    """The body comes so slowly that waiting for it would hold a place for nothing."""

    default_code = "request_timeout"


class NoSuchRoute(NotFound):
    """There is nothing at this path."""

    default_code = "unknown_url"


class WrongMethod(InvalidInput):
    """The path exists, but not with this method."""

    default_code = "method_not_allowed"


_STATUS: dict[type[RoundhouseError], int] = {BodyTooLarge: 413, BodyTooSlow: 408, WrongMethod: 405}


def http_status(error: RoundhouseError) -> int:
    """The HTTP status of an error."""
    return _STATUS.get(type(error)) or error_shape(error).http_status


def openai_error(error: RoundhouseError) -> dict[str, object]:
    """The body of an error as OpenAI clients read it."""
    return {
        "error": {
            "message": error.message,
            "type": error_shape(error).openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: RoundhouseError) -> dict[str, str]:
    """When to come again, or that it is of no use."""
    if isinstance(error, BudgetExhausted):
        return {"x-should-retry": "false"}
    if error.retry_after_ms is None:
        return {}
    milliseconds = max(1, error.retry_after_ms)
    return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}


def error_response(error: RoundhouseError, path: str) -> Response:
    """The answer for a request to `path` that failed before its header was sent."""
    body: dict[str, object] = {"error": error.message} if path.startswith("/v2") else openai_error(error)
    return Response(
        _encode(body), status_code=http_status(error), headers=error_headers(error), media_type="application/json"
    )


def internal_error() -> RoundhouseError:
    """What a client hears of a fault of ours: nothing but that it was one."""
    return RoundhouseError("The gateway failed to handle the request.", code="internal_error")

"""The errors that cross rooms, and the one table that maps them to HTTP, gRPC and OpenAI shapes.

Adapters translate library errors into these with `raise … from`. Expected refusals inside the domain are results, not
exceptions. Texts may reach callers: they never hold a prompt, a key or another tenant's name (invariant 16).
Source of the shapes: the OpenAI error object and google.rpc.Code; docs/decisions/0005-errors.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import grpc


class RoundhouseError(Exception):
    """Base of all. `message` is for the caller; `code` and `param` follow the OpenAI error object."""

    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_ms = retry_after_ms


class InvalidInput(RoundhouseError):
    """The caller's input is wrong; the same request will never work."""


class Unauthenticated(RoundhouseError):
    """No key, or a key that is unknown, revoked or expired."""

    default_code = "invalid_api_key"


class Forbidden(RoundhouseError):
    """The key is good but may not do this."""

    default_code = "permission_denied"


class NotFound(RoundhouseError):
    """There is no such thing, or this tenant may not see it: both look the same."""

    default_code = "model_not_found"


class Conflict(RoundhouseError):
    """Another state of the thing is already recorded."""

    default_code = "conflict"


class LimitExceeded(RoundhouseError):
    """A limit of the tenant or key; `retry_after_ms` says when it has room again."""

    default_code = "rate_limit_exceeded"


class BudgetExhausted(RoundhouseError):
    """The tenant's budget is spent; retrying does not help."""

    default_code = "insufficient_quota"


class CapacityExhausted(RoundhouseError):
    """There is no room now."""

    default_code = "server_is_overloaded"


class DeadlinePassed(RoundhouseError):
    """The request's deadline passed."""

    default_code = "deadline_exceeded"


class Unavailable(RoundhouseError):
    """A part we need is away; a retry may work."""

    default_code = "unavailable"


class EngineFailed(RoundhouseError):
    """The engine reported an error or died while it ran the request."""

    default_code = "engine_error"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one error class looks on each wire."""

    http_status: int
    grpc_code: grpc.StatusCode
    openai_type: str


ERROR_SHAPES: Mapping[type[RoundhouseError], ErrorShape] = {
    InvalidInput: ErrorShape(400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error"),
    Unauthenticated: ErrorShape(401, grpc.StatusCode.UNAUTHENTICATED, "invalid_request_error"),
    Forbidden: ErrorShape(403, grpc.StatusCode.PERMISSION_DENIED, "permission_error"),
    NotFound: ErrorShape(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error"),
    Conflict: ErrorShape(409, grpc.StatusCode.ABORTED, "conflict_error"),
    LimitExceeded: ErrorShape(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error"),
    BudgetExhausted: ErrorShape(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "insufficient_quota"),
    CapacityExhausted: ErrorShape(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error"),
    Unavailable: ErrorShape(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error"),
    DeadlinePassed: ErrorShape(504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error"),
    EngineFailed: ErrorShape(502, grpc.StatusCode.UNAVAILABLE, "server_error"),
    RoundhouseError: ErrorShape(500, grpc.StatusCode.INTERNAL, "server_error"),
}


def error_shape(error: RoundhouseError) -> ErrorShape:
    """The wire shape of an error: that of its nearest listed class."""
    return next(ERROR_SHAPES[cls] for cls in type(error).__mro__ if cls in ERROR_SHAPES)

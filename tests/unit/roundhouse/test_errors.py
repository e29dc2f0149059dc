"""Every error has one shape on every wire."""

import grpc
import pytest

from roundhouse import errors


@pytest.mark.parametrize(
    ("error", "http_status", "grpc_code", "openai_type"),
    [
        (errors.InvalidInput("x"), 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error"),
        (errors.Unauthenticated("x"), 401, grpc.StatusCode.UNAUTHENTICATED, "invalid_request_error"),
        (errors.NotFound("x"), 404, grpc.StatusCode.NOT_FOUND, "invalid_request_error"),
        (errors.LimitExceeded("x"), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error"),
        (errors.BudgetExhausted("x"), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "insufficient_quota"),
        (errors.CapacityExhausted("x"), 503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error"),
        (errors.DeadlinePassed("x"), 504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error"),
    ],
)
def test_shape(error: errors.RoundhouseError, http_status: int, grpc_code: grpc.StatusCode, openai_type: str) -> None:
    """The table is what unmodified clients expect."""
    shape = errors.error_shape(error)
    assert (shape.http_status, shape.grpc_code, shape.openai_type) == (http_status, grpc_code, openai_type)


def test_subclass_uses_the_shape_of_its_base() -> None:
    """An error class of a service needs no row of its own."""

    class TooManyFiles(errors.InvalidInput):
        pass

    assert errors.error_shape(TooManyFiles("x")).http_status == 400


def test_code_defaults_to_the_class_and_can_be_named() -> None:
    """`code` is what clients branch on."""
    assert errors.NotFound("x").code == "model_not_found"
    assert errors.InvalidInput("x", code="context_length_exceeded").code == "context_length_exceeded"

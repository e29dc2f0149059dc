"""The edge to gRPC: channels and servers with the same limits, errors and trace context everywhere.

Servers answer `RoundhouseError` as the status of the table in `errors.py`, with RetryInfo where a delay is known.
Clients get it back through `from_rpc_error`. Anything else an implementation raises is INTERNAL without its text.
"""

import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from opentelemetry.trace import SpanKind

from roundhouse import telemetry
from roundhouse.errors import (
    CapacityExhausted,
    Conflict,
    DeadlinePassed,
    Forbidden,
    InvalidInput,
    NotFound,
    RoundhouseError,
    Unauthenticated,
    Unavailable,
    error_shape,
)

log = structlog.get_logger(__name__)

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
# A restarted peer is found again within a second; the library's own back-off grows to two minutes. A try may itself
# take a second ("min" is the library's word for that), which is long for a network and short for a caller.
_RECONNECT: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_ACCEPT_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", 32 * 1024),  # a key, a trace and what proxies add take a few hundred bytes
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain-text channel that notices a dead peer within 15 s of an open call and dials a lost one every second.

    Close it when done."""
    return grpc.aio.insecure_channel(address, options=_LIMITS + _KEEPALIVE + _RECONNECT)


class GrpcServer:
    """An aio server with health, reflection, error mapping and trace context."""

    def __init__(self, *, reuse_port: bool = False) -> None:
        """With `reuse_port` other processes may serve the same port; else a taken port is an error."""
        sharing = [("grpc.so_reuseport", int(reuse_port))]
        self.server = grpc.aio.server(interceptors=[_EdgeInterceptor()], options=_LIMITS + _ACCEPT_KEEPALIVE + sharing)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self.port = 0

    async def start(
        self, host: str, port: int, service_names: Sequence[str], *, tls: tuple[Path, Path, Path | None] | None = None
    ) -> int:
        """Listen and report SERVING for each name. Port 0 picks a free one; returns the port. Raises Unavailable.

        `tls` is certificate, key and, for clients that must show a certificate, their CAs: PEM files."""
        names = (*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        try:
            address = f"{host}:{port}"
            if tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, _server_credentials(*tls))
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: is the port taken?") from error
        await self.server.start()
        for name in ("", *service_names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _server_credentials(certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    roots = None if client_ca is None else client_ca.read_bytes()
    pair = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


async def abort(context: Any, error: RoundhouseError) -> NoReturn:
    """End the call with the error's status."""
    status = status_pb2.Status(code=_code_number(error_shape(error).grpc_code), message=error.message)
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


def _code_number(code: grpc.StatusCode) -> int:
    return int(code_pb2.Code.Value(code.name))


_FROM_CODE: dict[grpc.StatusCode, type[RoundhouseError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidInput,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ABORTED: Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def from_rpc_error(error: grpc.aio.AioRpcError, what: str) -> RoundhouseError:
    """Our error for a failed call to one of our own services; `what` names the call."""
    kind = _FROM_CODE.get(error.code(), Unavailable)
    return kind(f"{what}: {error.details() or error.code().name}")


class _EdgeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]  # untyped base in some releases
    """Wraps every implementation with the trace context of the caller and the error table."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        headers = {
            str(key): str(value)
            for key, value in handler_call_details.invocation_metadata or ()
            if key == "traceparent"
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _wrap_unary(handler.unary_unary, method, headers),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _wrap_stream(handler.unary_stream, method, headers),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                _wrap_stream(handler.stream_stream, method, headers),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


def _wrap_unary(implementation: Any, method: str, headers: dict[str, str]) -> Any:
    async def call(request: Any, context: Any) -> Any:
        with telemetry.continued_span(method, headers, SpanKind.SERVER):
            try:
                return await implementation(request, context)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller hears what the table says
                await _abort_for(context, error, method)

    return call


def _wrap_stream(implementation: Any, method: str, headers: dict[str, str]) -> Any:
    """A generator's replies are sent one by one; a coroutine writes them itself, and so knows when one is sent."""

    async def written(request: Any, context: Any) -> None:
        with telemetry.continued_span(method, headers, SpanKind.SERVER):
            try:
                await implementation(request, context)
            except Exception as error:  # noqa: BLE001 - as above
                await _abort_for(context, error, method)

    async def yielded(request: Any, context: Any) -> AsyncIterator[Any]:
        with telemetry.continued_span(method, headers, SpanKind.SERVER):
            try:
                async for reply in implementation(request, context):
                    yield reply
            except Exception as error:  # noqa: BLE001 - as above
                await _abort_for(context, error, method)

    return written if inspect.iscoroutinefunction(implementation) else yielded


async def _abort_for(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, RoundhouseError):
        await abort(context, error)
    if isinstance(error, grpc.aio.AbortError):
        raise error
    # Its text may quote a request (invariant 16), and grpc would send it to the caller.
    where = "".join(traceback.format_tb(error.__traceback__)[-6:])
    log.error("grpc_handler_failed", method=method, error=type(error).__name__, where=where)
    await abort(context, RoundhouseError("The call failed."))

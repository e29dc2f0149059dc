"""`LoaderFleet` over gRPC, one channel an address."""

from collections.abc import AsyncIterator

import grpc

from roundhouse import telemetry
from roundhouse.grpc_edge import from_rpc_error, open_channel
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc

MARGIN_S = 5.0  # beyond the deadline that the loader itself keeps, for one that hangs


class GrpcLoaderFleet:
    """Channels stay open until `close`; there are as many as nodes were ever seen."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ensure_loaded(
        self, address: str, request: loading_pb2.EnsureLoadedRequest
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        """See `LoaderFleet.ensure_loaded`."""
        stub = loading_pb2_grpc.LoaderStub(self._channel(address))
        timeout_s = request.deadline_ms / 1000 + MARGIN_S
        call = stub.EnsureLoaded(request, timeout=timeout_s, metadata=telemetry.trace_metadata())
        try:
            async for progress in call:
                yield progress
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, request.version.model) from error
        finally:
            call.cancel()

    async def ensure_unloaded(self, address: str, request: loading_pb2.EnsureUnloadedRequest) -> None:
        """See `LoaderFleet.ensure_unloaded`."""
        stub = loading_pb2_grpc.LoaderStub(self._channel(address))
        timeout_s = request.deadline_ms / 1000 + MARGIN_S
        try:
            await stub.EnsureUnloaded(request, timeout=timeout_s, metadata=telemetry.trace_metadata())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, request.version.model) from error

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

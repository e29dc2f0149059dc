"""`AdapterPlaces` at the nodes' loaders: one connection a node, and what they said remembered while it holds.

A loader keeps what it named for some seconds; half of that this process does without asking again. It is remembered for
the tenant that asked, so what one may use tells nothing to another (invariant 16).
"""

from collections import OrderedDict
from dataclasses import dataclass

import grpc

from roundhouse import telemetry
from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound, Unavailable
from roundhouse.grpc_edge import from_rpc_error, open_channel
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.ports import EngineRequest, FoundAdapter

REMEMBERED_MAX = 10_000  # places; about 5 MB
STAGE_MS_MAX = 30_000  # kilobytes from a source; then another attempt, on another node, is worth more
LATER_MS = 10_000  # requests that begin within this time are asked for too; more than what is remembered
GRACE_S = 1.0  # for the loader's own answer about its deadline

_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class _Found:
    adapter: FoundAdapter
    until_ms: int  # monotonic; so long it need not be asked for again
    use_until_ms: int  # until when a request that uses it may run


class LoaderAdapters:
    """See the module. `close` when no request runs any more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._found: OrderedDict[_Key, _Found] = OrderedDict()

    async def find(self, placement: Placement, request: EngineRequest, *, timeout_ms: int) -> FoundAdapter:
        """See `AdapterPlaces.find`."""
        key, asked_ms = _key(placement, request), self._clock.monotonic_ms()
        known = self._found.get(key)
        if known is not None and known.until_ms > asked_ms and known.use_until_ms >= asked_ms + timeout_ms:
            return known.adapter
        use_ms = timeout_ms + LATER_MS
        reply = await self._ask(placement, request, min(timeout_ms, STAGE_MS_MAX), use_ms)
        found = FoundAdapter(reply.path, reply.engine_name)
        self._found[key] = _Found(found, asked_ms + reply.keep_ms // 2, asked_ms + use_ms)
        self._found.move_to_end(key)
        while len(self._found) > REMEMBERED_MAX:
            self._found.popitem(last=False)
        return found

    def forget(self, placement: Placement, request: EngineRequest) -> None:
        """See `AdapterPlaces.forget`."""
        self._found.pop(_key(placement, request), None)

    async def close(self) -> None:
        """Close all connections."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _ask(
        self, placement: Placement, request: EngineRequest, timeout_ms: int, use_ms: int
    ) -> loading_pb2.EnsureAdapterReply:
        if not placement.loader_address:
            raise Unavailable("The node named no loader for its adapters.")
        message = loading_pb2.EnsureAdapterRequest(
            adapter=request.adapter_name,
            digest=request.adapter_digest,
            tenant_id=request.tenant_id,
            triton_model_name=placement.triton_model_name,
            deadline_ms=timeout_ms,
            use_ms=use_ms,
        )
        try:
            return await self._call(placement, message, timeout_ms / 1000 + GRACE_S)
        except grpc.aio.AioRpcError as error:
            raise _as_error(error, request) from error

    async def _call(
        self, placement: Placement, message: loading_pb2.EnsureAdapterRequest, timeout_s: float
    ) -> loading_pb2.EnsureAdapterReply:
        stub = loading_pb2_grpc.LoaderStub(self._channel(placement.loader_address))
        return await stub.EnsureAdapter(message, timeout=timeout_s, metadata=telemetry.trace_metadata())

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]


def _key(placement: Placement, request: EngineRequest) -> _Key:
    return placement.loader_address, placement.triton_model_name, request.adapter_digest, request.tenant_id


def _as_error(error: grpc.aio.AioRpcError, request: EngineRequest) -> Exception:
    """What does not fit is told to the adapter's user; an instance that has gone meanwhile is worth another attempt."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidInput(
            f"The adapter '{request.adapter_name}' cannot be used: {error.details()}",
            code="adapter_invalid",
            param="model",
        )
    made = from_rpc_error(error, "the adapter is not on the node")
    if isinstance(made, NotFound):
        return Unavailable(made.message)
    return made

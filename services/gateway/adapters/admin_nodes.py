"""The nodes, as operators see and command them: states from the bus, commands over gRPC to the loaders."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import structlog

from roundhouse import telemetry
from roundhouse.clock import Clock
from roundhouse.grpc_edge import from_rpc_error, open_channel
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc
from services.gateway.operations.admin_ports import LoadCommand

log = structlog.get_logger(__name__)

ALIVE_MS = 10_000  # ten missed states: the bound after which a node counts as gone (case B48)
NODES_MAX = 10_000  # bounds what a faulty sender can make this process keep
REASON = "operator"
_GRACE_S = 5.0  # the loader answers within the deadline it is given; this is for the way there and back


@dataclass(frozen=True, slots=True)
class _Heard:
    state: loading_pb2.NodeState
    at_ms: int  # monotonic


class HeardNodeStates:
    """`NodeStates` from what loaders publish every second: let it `observe` what a `NodeStateFeed` hears."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[str, _Heard] = {}

    async def all(self) -> Sequence[loading_pb2.NodeState]:
        """See `NodeStates.all`."""
        oldest_ms = self._clock.monotonic_ms() - ALIVE_MS
        self._heard = {node: heard for node, heard in self._heard.items() if heard.at_ms >= oldest_ms}
        return [self._heard[node].state for node in sorted(self._heard)]

    def observe(self, state: loading_pb2.NodeState) -> None:
        """Take in what one node says; an older word of the same process changes nothing."""
        known = self._heard.get(state.node_id)
        if known is None and len(self._heard) >= NODES_MAX:
            return
        if known is not None and _is_older(state, known.state):
            return
        self._heard[state.node_id] = _Heard(state, self._clock.monotonic_ms())


def _is_older(state: loading_pb2.NodeState, than: loading_pb2.NodeState) -> bool:
    return state.incarnation == than.incarnation and state.sequence < than.sequence


class GrpcNodeLoader:
    """`NodeLoader` over one short-lived channel a command: operators' commands are rare."""

    async def load(self, command: LoadCommand, *, timeout_ms: int) -> None:
        """See `NodeLoader.load`."""
        request = loading_pb2.EnsureLoadedRequest(
            version=command.version, deadline_ms=timeout_ms, reason=REASON, target=command.target
        )
        try:
            async with open_channel(command.loader_address) as channel:
                stub = loading_pb2_grpc.LoaderStub(channel)
                call = stub.EnsureLoaded(
                    request, timeout=timeout_ms / 1000 + _GRACE_S, metadata=telemetry.trace_metadata()
                )
                async for _ in call:
                    pass  # progress; the stream's end is the answer
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the loader did not load it") from error

    async def unload(self, command: LoadCommand, *, timeout_ms: int) -> bool:
        """See `NodeLoader.unload`."""
        request = loading_pb2.EnsureUnloadedRequest(version=command.version, deadline_ms=timeout_ms, reason=REASON)
        try:
            async with open_channel(command.loader_address) as channel:
                stub = loading_pb2_grpc.LoaderStub(channel)
                reply = await stub.EnsureUnloaded(
                    request, timeout=timeout_ms / 1000 + _GRACE_S, metadata=telemetry.trace_metadata()
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the loader did not unload it") from error
        return bool(reply.was_loaded)


class GrpcNodeMaintenance:
    """`NodeMaintenance` over one short-lived channel a command."""

    async def drain(self, loader_address: str, reason: str) -> None:
        """See `NodeMaintenance.drain`."""
        request = loading_pb2.DrainNodeRequest(reason=reason)
        try:
            async with open_channel(loader_address) as channel:
                call = loading_pb2_grpc.LoaderStub(channel).DrainNode(
                    request, timeout=_GRACE_S, metadata=telemetry.trace_metadata()
                )
                async for _ in call:
                    break  # its first word says that it has begun; it goes on without a caller
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the loader did not begin to drain") from error

    async def resume(self, loader_address: str) -> None:
        """See `NodeMaintenance.resume`."""
        try:
            async with open_channel(loader_address) as channel:
                await loading_pb2_grpc.LoaderStub(channel).ResumeNode(
                    loading_pb2.ResumeNodeRequest(), timeout=_GRACE_S, metadata=telemetry.trace_metadata()
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the loader did not resume") from error

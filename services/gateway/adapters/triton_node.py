"""`InferenceNode` on real Triton servers: one gRPC channel a node, one stream a request.

Cancelling the stream cancels the request on the node (tried: the model's `is_cancelled()` turns true). The channel's
keepalive notices a dead or stopped node within 15 s; a model process that died on a living node is found by
`silent_streams`; anything else that produces nothing is bounded by the deadline.
Decision: docs/decisions/0091-triton-streams.md.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import grpc
import structlog
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.errors import DeadlinePassed, EngineFailed, InvalidInput
from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.silent_streams import SilenceWatch, says_dead
from services.gateway.adapters.triton_tensors import chunk_of, generate_message, infer_message, reply_of
from services.gateway.ports import EngineChunk, EngineRequest, InstanceBroken, TensorReply, TensorRequest

log = structlog.get_logger(__name__)

# Contract: "invalid_request: <param>: why" and "context_length_exceeded: why". Triton may put words before them.
_INVALID = re.compile(r"invalid_request: (?P<param>[a-z_]+): (?P<why>.*)", re.DOTALL)
_TOO_LONG = re.compile(r"context_length_exceeded: (?P<why>.*)", re.DOTALL)
CODE_CHARACTERS_MAX = 40  # an engine's error code; what follows it may quote a prompt and is not logged


class TritonNodes:
    """See `InferenceNode`. `close` when no stream runs any more."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `InferenceNode.generate`."""
        message = generate_message(placement.triton_model_name, request)
        stub = self._stub(placement)
        call = stub.ModelStreamInfer(iter((message,)), timeout=timeout_ms / 1000)
        watch = SilenceWatch(stub, call, placement.triton_model_name)
        try:
            async with watch:
                async for reply in call:
                    watch.heard()
                    if reply.error_message:
                        raise engine_error(reply.error_message, placement)
                    if reply.infer_response.outputs:  # an empty one only marks the end
                        yield chunk_of(reply.infer_response)
        except grpc.aio.AioRpcError as error:
            _raise(error, placement)
        except asyncio.CancelledError:
            if not watch.dead:
                raise
            log.warning("engine_died", node=placement.node_id, model=placement.triton_model_name)
            raise InstanceBroken("The engine died while it ran the request.") from None
        finally:
            call.cancel()  # no effect on a stream that has ended

    async def infer(self, placement: Placement, request: TensorRequest, *, timeout_ms: int) -> TensorReply:
        """See `InferenceNode.infer`. A decoupled model must give exactly one response."""
        message = infer_message(placement.triton_model_name, request)
        try:
            return reply_of(await self._stub(placement).ModelInfer(message, timeout=timeout_ms / 1000))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInput(error.details() or "The model refused the tensors.") from error
            _raise(error, placement)

    async def close(self) -> None:
        """Close all channels. Streams that still run end with EngineFailed."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _stub(self, placement: Placement) -> Any:
        address = placement.triton_grpc_address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return kserve_grpc.GRPCInferenceServiceStub(channel)


def engine_error(text: str, placement: Placement) -> InvalidInput | EngineFailed:
    """Our error for what an engine says; only texts that the contract gives to the caller reach the caller."""
    if (found := _INVALID.search(text)) is not None:
        return InvalidInput(found["why"], param=found["param"])
    if (found := _TOO_LONG.search(text)) is not None:
        return InvalidInput(found["why"], code="context_length_exceeded")
    if says_dead(text):
        log.warning("engine_dead", node=placement.node_id, model=placement.triton_model_name)
        return InstanceBroken("The engine that was to run the request is dead.")
    code = text.partition(":")[0][:CODE_CHARACTERS_MAX]
    log.warning("engine_failed", node=placement.node_id, model=placement.triton_model_name, code=code)
    return EngineFailed("The engine failed while it ran the request.")


def _raise(error: grpc.aio.AioRpcError, placement: Placement) -> NoReturn:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise DeadlinePassed("The deadline of the request passed.") from error
    log.warning("node_failed", node=placement.node_id, model=placement.triton_model_name, status=error.code().name)
    raise EngineFailed("The node that ran the request failed.") from error

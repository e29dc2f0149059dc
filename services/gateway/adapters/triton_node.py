"""`InferenceNode` on real Triton servers: one connection a node, one stream a request.

Cancelling the stream cancels the request on the node (tried: the model's `is_cancelled()` turns true). The connection's
keepalive notices a dead or stopped node within 15 s; a model process that died on a living node is found by
`silent_streams`; anything else that produces nothing is bounded by the deadline. Token streams have a connection of
their own kind (`node_connection`); calls of tensor models, one message each way, go over grpc.aio.
Decision: docs/decisions/0091-triton-streams.md.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.errors import DeadlinePassed, EngineFailed, InvalidInput
from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.node_call import DEADLINE_EXCEEDED, UNAVAILABLE, Call, CallFailed
from services.gateway.adapters.node_connection import NodeConnection
from services.gateway.adapters.silent_streams import InstanceWatches, StreamWatch, says_dead
from services.gateway.adapters.triton_chunks import ChunkReading, KnownHeads
from services.gateway.adapters.triton_tensors import generate_message, infer_message, reply_of
from services.gateway.adapters.vllm_logprobs import in_our_form
from services.gateway.ports import EngineChunk, EngineRequest, InstanceBroken, NodeLost, TensorReply, TensorRequest

log = structlog.get_logger(__name__)

# Contract: "invalid_request: <param>: why" and "context_length_exceeded: why". Triton may put words before them.
_INVALID = re.compile(r"invalid_request: (?P<param>[a-z_]+): (?P<why>.*)", re.DOTALL)
_TOO_LONG = re.compile(r"context_length_exceeded: (?P<why>.*)", re.DOTALL)
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
CONNECT_TIMEOUT_S = 1.0  # as `grpc_edge.open_channel`: long for a network, short for a caller
MODELS_KNOWN_MAX = 1_000  # a guess: models in use at a time; a forgotten one costs a parse
CODE_CHARACTERS_MAX = 40  # an engine's error code; what follows it may quote a prompt and is not logged


class TritonNodes:
    """See `InferenceNode`. `close` when no stream runs any more."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}  # for calls of tensor models
        self._connections: dict[str, NodeConnection] = {}  # for streams
        self._opening: dict[str, asyncio.Task[NodeConnection]] = {}
        self._watches = InstanceWatches()
        self._heads: dict[str, KnownHeads] = {}  # by model, the oldest first

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `InferenceNode.generate`. Tokens that are ready together come as one chunk."""
        address, model = placement.triton_grpc_address, placement.triton_model_name
        message = generate_message(model, request).SerializeToString()
        try:
            call = await self._begin(address, message, timeout_ms / 1000)
        except (CallFailed, OSError, TimeoutError) as error:
            _raise_failed(error, placement)
        watch = StreamWatch(call)
        self._watches.add(address, model, watch, partial(self._begin, address))
        reading = ChunkReading(request.request_id, self._known_heads(model))
        try:
            while messages := await call.read():
                watch.heard = True
                chunk, error_text = reading.chunk(messages)
                if chunk is not None:
                    yield _with_our_logprobs(chunk, request)
                if error_text:
                    raise engine_error(error_text, placement)
        except CallFailed as error:
            if watch.dead:
                log.warning("engine_died", node=placement.node_id, model=model)
                raise InstanceBroken("The engine died while it ran the request.") from error
            _raise_failed(error, placement)
        finally:
            self._watches.remove(address, model, watch)
            call.cancel()  # no effect on a stream that has ended

    def _known_heads(self, model: str) -> KnownHeads:
        known = self._heads.get(model)
        if known is None:
            while len(self._heads) >= MODELS_KNOWN_MAX:
                self._heads.pop(next(iter(self._heads)))
            known = self._heads[model] = KnownHeads()
        return known

    async def _begin(self, address: str, message: bytes, timeout_s: float) -> Call:
        """Begin a stream on the node's connection, which is opened first if need be.

        Raises CallFailed, OSError, TimeoutError."""
        connection = self._connections.get(address)
        if connection is None or not connection.usable:
            connection = await self._connected(address, min(timeout_s, CONNECT_TIMEOUT_S))
        return await connection.call(message, timeout_s)

    async def _connected(self, address: str, timeout_s: float) -> NodeConnection:
        """One attempt at a time for each node, shared by all who wait for it."""
        opening = self._opening.get(address)
        if opening is None:
            opening = asyncio.create_task(NodeConnection.open(address, STREAM_METHOD, timeout_s))
            self._opening[address] = opening
            opening.add_done_callback(lambda done: self._opened(address, done))
        return await asyncio.shield(opening)

    def _opened(self, address: str, opening: "asyncio.Task[NodeConnection]") -> None:
        del self._opening[address]
        if not opening.cancelled() and opening.exception() is None:
            self._connections[address] = opening.result()

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
        """Close all connections. Streams that still run end with EngineFailed."""
        await self._watches.close()
        for opening in list(self._opening.values()):
            opening.cancel()
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _stub(self, placement: Placement) -> Any:
        address = placement.triton_grpc_address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return kserve_grpc.GRPCInferenceServiceStub(channel)


def _with_our_logprobs(chunk: EngineChunk, request: EngineRequest) -> EngineChunk:
    if not chunk.logprobs:
        return chunk
    wanted = json.loads(request.sampling_parameters).get("logprobs") or 0
    return replace(chunk, logprobs=in_our_form(chunk.logprobs, wanted))


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
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        raise NodeLost("The node that ran the request failed.") from error
    raise EngineFailed("The node that ran the request failed.") from error


def _raise_failed(error: Exception, placement: Placement) -> NoReturn:
    status = error.status if isinstance(error, CallFailed) else None
    if status == DEADLINE_EXCEEDED:
        raise DeadlinePassed("The deadline of the request passed.") from error
    log.warning("node_failed", node=placement.node_id, model=placement.triton_model_name, status=status)
    if status is None or status == UNAVAILABLE:
        raise NodeLost("The node that ran the request failed.") from error
    raise EngineFailed("The node that ran the request failed.") from error

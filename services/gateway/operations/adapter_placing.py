"""Has an adapter on the node before the engine is asked for it: its loader stages, checks and says where it lies.

Between grant and stream, on each node that a request runs on: nobody else knows both the node and that it is certain.
A warm adapter costs one look into a table, a cold one kilobytes from its source; the slot is held meanwhile.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from roundhouse.errors import EngineFailed, InvalidInput
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.domain.sampling import with_adapter
from services.gateway.ports import (
    AdapterPlaces,
    EngineChunk,
    EngineRequest,
    InferenceNode,
    TensorReply,
    TensorRequest,
)


class AdapterPlacing:
    """`InferenceNode` that names the adapter's path to the one behind it."""

    def __init__(self, node: InferenceNode, places: AdapterPlaces) -> None:
        self._node = node
        self._places = places

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `InferenceNode.generate`; raises also what `AdapterPlaces.find` does."""
        if request.adapter_digest:
            found = await self._places.find(placement, request, timeout_ms=timeout_ms)
            request = replace(
                request,
                adapter_path=found.path,
                sampling_parameters=with_adapter(request.sampling_parameters, found.engine_name),
            )
        try:
            async with aclosing(self._node.generate(placement, request, timeout_ms=timeout_ms)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (EngineFailed, InvalidInput):
            if request.adapter_digest:
                self._places.forget(placement, request)
            raise

    async def infer(self, placement: Placement, request: TensorRequest, *, timeout_ms: int) -> TensorReply:
        """See `InferenceNode.infer`: tensors have no adapters."""
        return await self._node.infer(placement, request, timeout_ms=timeout_ms)

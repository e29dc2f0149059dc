"""The loader's gRPC service: converts messages, and says refusals in the codes that `loading.proto` promises."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from roundhouse.errors import CapacityExhausted, InvalidInput
from roundhouse.vocabulary import AdapterName, Digest, ModelName, TenantId
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc, vocabulary_pb2
from services.loader.domain.versions import ModelVersion
from services.loader.operations.adapters import KEEP_MS, AdapterOrder, Adapters
from services.loader.operations.admission import NEVER_FITS
from services.loader.operations.describe import STATES, describe_instance
from services.loader.operations.ensure import LoadOrder, Orders, UnloadOrder
from services.loader.operations.maintenance import Maintenance
from services.loader.operations.node import Node
from services.loader.operations.prestage import Prestage, StageOrder
from services.loader.operations.progress import Progress, ProgressGauge
from services.loader.operations.tell import Announcer

SERVICE = "roundhouse.v1.Loader"
_STAGED_ONLY = (vocabulary_pb2.TIER_HOST, vocabulary_pb2.TIER_DISK)


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who does what the service is asked for."""

    orders: Orders
    prestage: Prestage
    gauge: ProgressGauge
    maintenance: Maintenance
    adapters: Adapters


class LoaderServicer(loading_pb2_grpc.LoaderServicer):
    """`roundhouse.v1.Loader`. Errors of ours that are raised here become statuses in `grpc_edge`."""

    def __init__(self, handlers: Handlers, node: Node, announcer: Announcer) -> None:
        self._orders = handlers.orders
        self._prestage = handlers.prestage
        self._gauge = handlers.gauge
        self._maintenance = handlers.maintenance
        self._adapters = handlers.adapters
        self._node = node
        self._announcer = announcer

    async def EnsureLoaded(  # noqa: N802 - the name in the proto
        self, request: loading_pb2.EnsureLoadedRequest, context: Any
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        """Follow one load to READY, or one staging to STAGED. A caller that cancels leaves it running."""
        version = _version(request.version)
        if request.target in _STAGED_ONLY:
            async for message in self._staged(version, request, context):
                yield message
            return
        order = LoadOrder(
            version,
            request.generation,
            tuple(_version(victim) for victim in request.unload_first),
            request.deadline_ms,
            request.reason,
            tuple(sorted(request.devices)),
            request.alone_for,
            request.unload_until_unix_ms,
        )
        try:
            async for progress in self._orders.ensure_loaded(order):
                yield self._progress(version, progress)
        except (InvalidInput, CapacityExhausted) as error:
            await _abort(context, error)

    async def _staged(
        self, version: ModelVersion, request: loading_pb2.EnsureLoadedRequest, context: Any
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        to_host = request.target == vocabulary_pb2.TIER_HOST
        order = StageOrder(version, to_host, request.deadline_ms, request.reason)
        try:
            async for progress in self._prestage.ensure_staged(order):
                yield self._progress(version, progress)
        except (InvalidInput, CapacityExhausted) as error:
            await _abort(context, error)

    async def EnsureUnloaded(  # noqa: N802 - the name in the proto
        self, request: loading_pb2.EnsureUnloadedRequest, context: Any
    ) -> loading_pb2.EnsureUnloadedReply:
        """Answer when the memory is free."""
        order = UnloadOrder(_version(request.version), request.generation, request.deadline_ms, request.reason)
        self._prestage.cancel(order.version)
        return loading_pb2.EnsureUnloadedReply(was_loaded=await self._orders.ensure_unloaded(order))

    async def EnsureAdapter(  # noqa: N802 - the name in the proto
        self, request: loading_pb2.EnsureAdapterRequest, context: Any
    ) -> loading_pb2.EnsureAdapterReply:
        """Answer where an engine finds an adapter, once it is there and fits."""
        order = AdapterOrder(
            AdapterName(request.adapter),
            Digest(request.digest),
            TenantId(request.tenant_id),
            request.triton_model_name,
            request.deadline_ms,
            request.use_ms,
        )
        place = await self._adapters.ensure(order)
        tier = vocabulary_pb2.TIER_HOST if place.in_host else vocabulary_pb2.TIER_DISK
        return loading_pb2.EnsureAdapterReply(
            path=str(place.path), tier=tier, keep_ms=KEEP_MS, engine_name=place.engine_name
        )

    async def DrainNode(  # noqa: N802 - the name in the proto
        self, request: loading_pb2.DrainNodeRequest, context: Any
    ) -> AsyncIterator[loading_pb2.NodeState]:
        """Follow the maintenance's beginning until nothing stands on the node. A caller that cancels stops nothing."""
        await self._maintenance.begin(request.reason or "maintenance")
        async for _ in self._maintenance.until_empty():
            yield self._announcer.current()

    async def ResumeNode(  # noqa: N802 - the name in the proto
        self, request: loading_pb2.ResumeNodeRequest, context: Any
    ) -> loading_pb2.NodeState:
        """The node takes work again."""
        await self._maintenance.end()
        return self._announcer.current()

    async def GetNodeState(  # noqa: N802 - the name in the proto
        self, request: loading_pb2.GetNodeStateRequest, context: Any
    ) -> loading_pb2.NodeState:
        """The state now."""
        return self._announcer.current()

    def _progress(self, version: ModelVersion, progress: Progress) -> loading_pb2.LoadProgress:
        message = loading_pb2.LoadProgress(
            version=vocabulary_pb2.ModelVersion(model=version.model, digest=version.digest),
            state=STATES.get(progress.state, vocabulary_pb2.INSTANCE_STATE_UNSPECIFIED),
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
            estimated_remaining_ms=progress.remaining_ms or 0,
        )
        home = self._node.residences.get(version)
        if message.state == vocabulary_pb2.INSTANCE_STATE_READY and home is not None:
            message.instance.CopyFrom(describe_instance(self._node, home, self._gauge))
        return message


def _version(message: vocabulary_pb2.ModelVersion) -> ModelVersion:
    if not message.model or not message.digest:
        raise InvalidInput("a version needs a model and a digest", param="version")
    return ModelVersion(ModelName(message.model), Digest(message.digest))


async def _abort(context: Any, error: InvalidInput | CapacityExhausted) -> NoReturn:
    """The two refusals whose codes here differ from the table that callers of the gateway see."""
    if isinstance(error, CapacityExhausted):
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
    if error.code == NEVER_FITS:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
    raise error

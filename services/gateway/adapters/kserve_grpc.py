"""KServe v2 over gRPC: `inference.GRPCInferenceService`, for clients of Triton as they are, with a key in the metadata.

Every method of the service needs a key; those that belong to operators (repository control, shared memory, logs and
trace settings) exist and refuse. Errors are those of the table in `roundhouse.errors` (case B04).
Source: KServe v2 (Open Inference Protocol), gRPC; the service definition is tritonclient's.
"""

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.errors import Forbidden, InvalidInput, RoundhouseError
from roundhouse.ops_server import Readiness
from services.gateway.adapters.grpc_requests import GrpcCalls
from services.gateway.adapters.kserve_bodies import refuse_unsupported
from services.gateway.adapters.kserve_rest import (
    EXTENSIONS,
    NOT_FOR_TENANTS,
    SERVER_NAME,
    known_signature,
    statistics_of,
)
from services.gateway.adapters.kserve_values import tensor_of_contents
from services.gateway.adapters.model_signatures import NodeSignatures
from services.gateway.adapters.offload import sized
from services.gateway.adapters.request_ids import new_request_id
from services.gateway.domain.tensors import Tensor
from services.gateway.operations.infer_tensors import VERSION, TensorCall, TensorWork
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.operations.run import Waiting
from services.gateway.operations.run_request import RequestParts
from services.gateway.ports import Caller, TensorReply

SERVICE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class KServeService(kserve_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated without types
    """The service. Methods that are not here refuse, with a key or without."""

    def __init__(
        self,
        parts: RequestParts,
        work: TensorWork,
        signatures: NodeSignatures,
        readiness: Readiness,
        calls: GrpcCalls,
    ) -> None:
        self._parts = parts
        self._work = work
        self._signatures = signatures
        self._readiness = readiness
        self._calls = calls

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        """Whether this process answers."""
        await self._caller(context)
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether this process can take work."""
        await self._caller(context)
        return kserve.ServerReadyResponse(ready=self._readiness.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Name and extensions."""
        await self._caller(context)
        return kserve.ServerMetadataResponse(name=SERVER_NAME, version="1", extensions=EXTENSIONS)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether a node has the model ready. Raises NotFound."""
        model = self._work.visible(await self._caller(context), request.name, request.version)
        return kserve.ModelReadyResponse(ready=await self._signatures.is_ready(model))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Inputs and outputs. Raises NotFound, and Unavailable until the model was ready somewhere once."""
        model = self._work.visible(await self._caller(context), request.name, request.version)
        signature = await known_signature(self._signatures, model)
        reply = kserve.ModelMetadataResponse(name=request.name, versions=[VERSION], platform=signature.platform)
        for specs, target in ((signature.inputs, reply.inputs), (signature.outputs, reply.outputs)):
            for spec in specs:
                target.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
        return reply

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Calls of one model, or of all of the tenant's, through this gateway. Raises NotFound."""
        caller = await self._caller(context)
        if request.name:
            self._work.visible(caller, request.name, request.version)
        names = [request.name] if request.name else self._work.names(caller)
        found = [statistics_of(self._work, caller, name) for name in names]
        return json_format.ParseDict({"model_stats": found}, kserve.ModelStatisticsResponse())

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """One call. The caller's cancellation or deadline ends it."""
        return await self._infer(request, context, await self._caller(context))

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Calls one after the other; a call that fails is answered with its text and does not end the stream."""
        caller = await self._caller(context)
        async for request in requests:
            try:
                yield kserve.ModelStreamInferResponse(infer_response=await self._infer(request, context, caller))
            except RoundhouseError as error:
                yield kserve.ModelStreamInferResponse(error_message=error.message)

    async def _infer(self, request: Any, context: Any, caller: Caller) -> Any:
        where = RequestContext(new_request_id(), caller, self._calls.deadline_unix_ms(context))
        self._work.visible(caller, request.model_name, request.model_version)
        refuse_unsupported(request.parameters)
        inputs = await sized(request.ByteSize(), inputs_of, request)
        call = TensorCall(request.model_name, request.model_version, inputs, tuple(o.name for o in request.outputs))
        work = await self._work.work(call, where)
        reply = kserve.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        async with self._work.statistics.counted(self._parts, work) as run:
            async for piece in run.events():
                if not isinstance(piece, Waiting) and isinstance(piece.piece, TensorReply):
                    _fill(reply, piece.piece)
        return reply

    async def _caller(self, context: Any) -> Caller:
        return await self._calls.caller(context)


def inputs_of(request: Any) -> tuple[Tensor, ...]:
    """The inputs of a call, from raw or typed contents. Raises InvalidInput (case B43)."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInput(f"there are {len(request.inputs)} inputs and {len(raw)} raw contents.", param="inputs")
    tensors: list[Tensor] = []
    for place, one in enumerate(request.inputs):
        refuse_unsupported(one.parameters)
        if not raw:
            tensors.append(tensor_of_contents(one.name, one.datatype, one.shape, one.contents))
        elif one.HasField("contents"):
            raise InvalidInput(f"input '{one.name}' has raw and typed contents.", param=one.name)
        else:
            tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), bytes(raw[place])))
    return tuple(tensors)


def _fill(reply: Any, produced: TensorReply) -> None:
    for tensor in produced.outputs:
        reply.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        reply.raw_output_contents.append(tensor.data)


def _refusing(*, streams: bool) -> Any:
    async def refuse(self: KServeService, request: Any, context: Any) -> Any:
        await self._caller(context)
        raise Forbidden(NOT_FOR_TENANTS)

    async def refuse_stream(self: KServeService, request: Any, context: Any) -> AsyncIterator[Any]:
        yield await refuse(self, request, context)

    return refuse_stream if streams else refuse


for _method in SERVICE.methods:
    # What the generated base class would answer without asking for a key (case B05).
    if _method.name not in vars(KServeService):
        setattr(KServeService, _method.name, _refusing(streams=_method.server_streaming))


def add_to_server(service: KServeService, server: Any) -> str:
    """Register the service; returns its full name."""
    kserve_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    return str(SERVICE.full_name)

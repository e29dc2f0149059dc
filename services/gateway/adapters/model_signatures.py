"""`SignatureSource`: asks a node that has the model ready, once a version, and remembers the answer.

A model that no node has ready and that nobody has asked for before has no known signature: then Triton checks the call.
"""

from collections import OrderedDict

import grpc
import structlog
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from roundhouse.catalogue.records import Model
from roundhouse.errors import RoundhouseError
from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.gateway.domain.tensors import ModelSignature, TensorSpec
from services.gateway.operations.admin_ports import NodeStates

log = structlog.get_logger(__name__)

SIGNATURES_MAX = 4096  # a guess: every version of a large catalogue, about 1 kB each
ASK_TIMEOUT_S = 1.0  # a node that is busy must not hold a request up that Triton would check anyway


class NodeSignatures:
    """See the module. Also says whether a model is ready anywhere."""

    def __init__(self, nodes: NodeStates) -> None:
        self._nodes = nodes
        self._known: OrderedDict[str, ModelSignature] = OrderedDict()

    async def signature(self, model: Model) -> ModelSignature | None:
        """See `SignatureSource.signature`. Never raises: what cannot be asked is not known."""
        known = self._known.get(model.digest)
        if known is not None:
            self._known.move_to_end(model.digest)
            return known
        place = await self._ready_place(model)
        if place is None:
            return None
        try:
            signature = await _ask(*place)
        except grpc.aio.AioRpcError:
            log.info("signature_not_known", model=model.name)
            return None
        self._known[model.digest] = signature
        if len(self._known) > SIGNATURES_MAX:
            self._known.popitem(last=False)
        return signature

    async def is_ready(self, model: Model) -> bool:
        """Whether some node could run the model now, without loading it."""
        return await self._ready_place(model) is not None

    async def _ready_place(self, model: Model) -> tuple[str, str] | None:
        try:
            states = await self._nodes.all()
        except RoundhouseError:
            return None
        for state in states:
            for instance in state.instances:
                if state.accepting and _is_ready(instance, model):
                    return state.triton_grpc_address, instance.triton_model_name
        return None


def _is_ready(instance: loading_pb2.Instance, model: Model) -> bool:
    same = instance.version.model == model.name and instance.version.digest == model.digest
    return same and instance.state == vocabulary_pb2.INSTANCE_STATE_READY


async def _ask(address: str, triton_model_name: str) -> ModelSignature:
    request = kserve.ModelMetadataRequest(name=triton_model_name)
    async with open_channel(address) as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        reply = await stub.ModelMetadata(request, timeout=ASK_TIMEOUT_S)
    return ModelSignature(reply.platform, _specs(reply.inputs), _specs(reply.outputs))


def _specs(tensors: "list[kserve.ModelMetadataResponse.TensorMetadata]") -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)

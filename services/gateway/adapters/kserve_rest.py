"""KServe v2 over REST, under /v2: health, metadata, readiness and inference of the tenant's models.

A model name means its current version, which is version 1 for clients that name one. Loading and unloading belong to
operators (admin API); for tenants' keys these routes exist and refuse. Errors are `{"error": text}`.
Source: KServe v2 (Open Inference Protocol) and Triton's model repository extension.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse.catalogue.records import Model
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import Forbidden, Unavailable
from roundhouse.ops_server import Readiness
from services.gateway.adapters.client_connection import Sender, while_connected
from services.gateway.adapters.http_edge import EdgeRoute
from services.gateway.adapters.http_requests import RequestReader
from services.gateway.adapters.kserve_bodies import HEADER_LENGTH, InferBody, infer_answer, parse_infer
from services.gateway.adapters.model_signatures import NodeSignatures
from services.gateway.adapters.offload import sized
from services.gateway.adapters.openai_answers import answered
from services.gateway.adapters.rate_headers import rate_limit_headers, timing_headers
from services.gateway.domain.tensors import ModelSignature, TensorSpec
from services.gateway.operations.accounting import Work
from services.gateway.operations.infer_tensors import VERSION, TensorCall, TensorWork
from services.gateway.operations.run import Waiting
from services.gateway.operations.run_request import RequestParts
from services.gateway.operations.tensor_statistics import TensorStatistics
from services.gateway.ports import Caller, TensorReply

SERVER_NAME = "roundhouse"
EXTENSIONS = ("binary_tensor_data", "model_repository", "statistics")
UNKNOWN_SIGNATURE_RETRY_MS = 5_000  # a guess: somebody may have loaded it by then
NOT_FOR_TENANTS = "Loading and unloading is for operators; models load by themselves when they are called."

_encode = msgspec.json.Encoder().encode
_Handler = Callable[[Request], Awaitable[ASGIApp]]


class KServeRoutes:
    """Handlers of KServe v2 REST."""

    def __init__(
        self,
        parts: RequestParts,
        work: TensorWork,
        signatures: NodeSignatures,
        catalogue: CatalogueView,
        reader: RequestReader,
        readiness: Readiness,
    ) -> None:
        self._parts = parts
        self._work = work
        self._signatures = signatures
        self._catalogue = catalogue
        self._reader = reader
        self._readiness = readiness

    def routes(self) -> list[BaseRoute]:
        """The route table."""
        fixed: list[tuple[str, _Handler, str]] = [
            ("/v2", self.server_metadata, "GET"),
            ("/v2/health/live", self.live, "GET"),
            ("/v2/health/ready", self.ready, "GET"),
            ("/v2/repository/index", self.index, "POST"),
            ("/v2/repository/models/{model}/load", self.refuse, "POST"),
            ("/v2/repository/models/{model}/unload", self.refuse, "POST"),
            ("/v2/models/stats", self.all_statistics, "GET"),
        ]
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            fixed += [
                (prefix, self.metadata, "GET"),
                (f"{prefix}/ready", self.model_ready, "GET"),
                (f"{prefix}/stats", self.statistics, "GET"),
                (f"{prefix}/infer", self.infer, "POST"),
            ]
        return [EdgeRoute(path, handler, methods=[method]) for path, handler, method in fixed]

    async def server_metadata(self, request: Request) -> Response:
        """GET /v2."""
        self._reader.inference_caller(request)
        return _json({"name": SERVER_NAME, "version": "1", "extensions": list(EXTENSIONS)})

    async def live(self, request: Request) -> Response:
        """GET /v2/health/live."""
        self._reader.inference_caller(request)
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        """GET /v2/health/ready."""
        self._reader.inference_caller(request)
        is_ready = self._readiness.ready
        return _json({"ready": is_ready}, status=200 if is_ready else 503)

    async def index(self, request: Request) -> Response:
        """POST /v2/repository/index: the tenant's models and whether a node has them ready."""
        caller = self._reader.inference_caller(request)
        entries: list[dict[str, str]] = []
        for name in self._catalogue.current.visible_names(caller.tenant_id):
            is_ready = await self._signatures.is_ready(self._work.visible(caller, name, ""))
            entries.append({"name": name, "version": VERSION, "state": "READY" if is_ready else "UNAVAILABLE"})
        return _json(entries)

    async def refuse(self, request: Request) -> Response:
        """POST /v2/repository/models/{model}/load and /unload."""
        raise Forbidden(NOT_FOR_TENANTS)

    async def metadata(self, request: Request) -> Response:
        """GET /v2/models/{model}. 503 until the model was ready somewhere once."""
        model = self._visible(request)
        return _json(metadata_of(request.path_params["model"], await known_signature(self._signatures, model)))

    async def model_ready(self, request: Request) -> Response:
        """GET /v2/models/{model}/ready."""
        model = self._visible(request)
        is_ready = await self._signatures.is_ready(model)
        return _json({"name": model.name, "ready": is_ready}, status=200 if is_ready else 503)

    async def all_statistics(self, request: Request) -> Response:
        """GET /v2/models/stats: of every model of the tenant, through this gateway."""
        caller = self._reader.inference_caller(request)
        names = self._catalogue.current.visible_names(caller.tenant_id)
        return _json({"model_stats": [statistics_of(self._work, caller, name) for name in names]})

    async def statistics(self, request: Request) -> Response:
        """GET /v2/models/{model}/stats."""
        self._visible(request)
        caller, name = self._reader.inference_caller(request), request.path_params["model"]
        return _json({"model_stats": [statistics_of(self._work, caller, name)]})

    async def infer(self, request: Request) -> ASGIApp:
        """POST /v2/models/{model}/infer."""
        context = self._reader.context(request)
        name, version = request.path_params["model"], request.path_params.get("version", "")
        self._work.visible(context.caller, name, version)
        data = await self._reader.body(request)
        body = await sized(len(data), parse_infer, data, request.headers.get(HEADER_LENGTH))
        work = await self._work.work(TensorCall(name, version, body.inputs, body.outputs), context)
        return _InferAnswer(self._parts, work, name, body, self._work.statistics)

    def _visible(self, request: Request) -> Model:
        caller = self._reader.inference_caller(request)
        return self._work.visible(caller, request.path_params["model"], request.path_params.get("version", ""))


class _InferAnswer:
    """ASGI answer of one inference."""

    def __init__(
        self, parts: RequestParts, work: Work, model: str, body: InferBody, statistics: TensorStatistics
    ) -> None:
        self._parts = parts
        self._statistics = statistics
        self._work = work
        self._model = model
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. Returns when it is settled, also if the client left."""
        sender = Sender(send)
        await while_connected(receive, answered(self._whole, sender, scope, receive, send), sender, scope)

    async def _whole(self, sender: Sender) -> None:
        async with self._statistics.counted(self._parts, self._work) as run:
            reply: TensorReply | None = None
            async for piece in run.events():
                if not isinstance(piece, Waiting) and isinstance(piece.piece, TensorReply):
                    reply = piece.piece
            assert reply is not None, "events end with a reply or an error"
            size = sum(len(tensor.data) for tensor in reply.outputs)
            data, json_length = await sized(size, infer_answer, self._model, VERSION, self._body, reply.outputs)
            headers = [
                (b"content-type", b"application/json" if json_length is None else b"application/octet-stream"),
                (b"content-length", str(len(data)).encode()),
                *rate_limit_headers(run.admitted),
                *timing_headers(run),
            ]
            if json_length is not None:
                headers.append((HEADER_LENGTH.encode(), str(json_length).encode()))
            await sender.start(200, headers)
            await sender.body(data, more=False)


async def known_signature(signatures: NodeSignatures, model: Model) -> ModelSignature:
    """The signature of a model; raises Unavailable while it is not known."""
    signature = await signatures.signature(model)
    if signature is None:
        raise Unavailable(
            f"The model '{model.name}' is not loaded, so its tensors are not known.",
            retry_after_ms=UNKNOWN_SIGNATURE_RETRY_MS,
        )
    return signature


def metadata_of(name: str, signature: ModelSignature) -> dict[str, object]:
    """KServe's model metadata."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": signature.platform,
        "inputs": [_spec(spec) for spec in signature.inputs],
        "outputs": [_spec(spec) for spec in signature.outputs],
    }


def statistics_of(work: TensorWork, caller: Caller, name: str) -> dict[str, Any]:
    """KServe's statistics of one model, as Triton's extension has them."""
    calls = work.statistics.of(caller.tenant_id, name)
    return {
        "name": name,
        "version": VERSION,
        "last_inference": calls.last_ms,
        "inference_count": calls.succeeded,
        "execution_count": calls.succeeded,
        "inference_stats": {
            "success": {"count": calls.succeeded, "ns": calls.succeeded_ns},
            "fail": {"count": calls.failed, "ns": calls.failed_ns},
        },
    }


def _spec(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _json(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status_code=status, media_type="application/json")

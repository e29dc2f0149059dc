"""`roundhouse.v1.Inference`: text, embeddings and the list of models over gRPC.

The same path as the OpenAI edge from the body on: one set of checks, limits, queues, bills and errors. Pieces are
written, not yielded, so that a reader who stalls holds the request only as long as its deadline or `STALL_S_MAX` allow
and the engine is told. A cancelled call cancels its request (case B14, invariant 1). Contract: inference.proto.
"""

import asyncio
import json
from typing import Any

import grpc

from roundhouse.catalogue.records import Interface
from roundhouse.catalogue.store import CatalogueView
from roundhouse.wire.v1 import inference_pb2 as wire
from roundhouse.wire.v1 import inference_pb2_grpc
from services.gateway.adapters import native_bodies
from services.gateway.adapters.client_connection import STALL_S_MAX
from services.gateway.adapters.grpc_requests import GrpcCalls
from services.gateway.adapters.http_edge import REQUEST_ID_HEADER
from services.gateway.adapters.openai_work import OpenAIWork, Prepared
from services.gateway.adapters.rate_headers import rate_limit_headers, timings
from services.gateway.domain.outcomes import ClientLeft
from services.gateway.operations.run import Run, Waiting
from services.gateway.operations.run_request import RequestParts, run_request
from services.gateway.ports import EngineChunk

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"]


class NativeService(inference_pb2_grpc.InferenceServicer):
    """The service. Every method needs a key that may run models."""

    def __init__(self, parts: RequestParts, work: OpenAIWork, catalogue: CatalogueView, calls: GrpcCalls) -> None:
        self._parts = parts
        self._work = work
        self._catalogue = catalogue
        self._calls = calls

    async def Generate(self, request: wire.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802 - writes instead of yielding
        """Stream one generation. Leaving early ends the engine's work too."""
        where = await self._calls.request(context)
        if request.WhichOneof("input") == "chat":
            prepared = await self._work.chat(native_bodies.chat_body(request), where)
        else:
            prepared = await self._work.completion(native_bodies.completion_body(request), where)
        try:
            await self._generate(prepared, context)
        except ClientLeft:
            await context.abort(grpc.StatusCode.CANCELLED, "The caller did not read.")

    async def _generate(self, prepared: Prepared, context: Any) -> None:
        async with run_request(self._parts, prepared.work) as run:
            is_open = False
            async for piece in run.events():
                if not is_open:
                    await context.send_initial_metadata(_head(run))
                    is_open = True
                if isinstance(piece, Waiting):
                    waiting = wire.GenerateResponse.Waiting(
                        stage=piece.stage, position=piece.position, estimated_ms=piece.estimated_ms
                    )
                    await _write(context, wire.GenerateResponse(waiting=waiting))
                elif isinstance(piece.piece, EngineChunk):
                    await _write(context, wire.GenerateResponse(piece=_piece(piece.index, piece.piece)))
            await _write(context, wire.GenerateResponse(ended=_ended(run)))

    async def Embed(self, request: wire.EmbedRequest, context: Any) -> wire.EmbedResponse:  # noqa: N802
        """Embed every input, all or none."""
        where = await self._calls.request(context)
        prepared = await self._work.embedding(native_bodies.embedding_body(request), where)
        vectors: dict[int, tuple[float, ...]] = {}
        async with run_request(self._parts, prepared.work) as run:
            async for piece in run.events():
                if not isinstance(piece, Waiting) and isinstance(piece.piece, EngineChunk) and piece.piece.embedding:
                    vectors[piece.index] = piece.piece.embedding
            await context.send_initial_metadata(_head(run))
        count = len(prepared.work.calls)
        embeddings = [wire.Embedding(values=vectors.get(index, ())) for index in range(count)]
        return wire.EmbedResponse(request_id=run.work.request_id, embeddings=embeddings, usage=_usage(run))

    async def ListModels(self, request: wire.ListModelsRequest, context: Any) -> wire.ListModelsResponse:  # noqa: N802
        """What this tenant may call, by name."""
        caller = await self._calls.caller(context)
        current = self._catalogue.current
        cards: list[wire.ModelCard] = []
        for name in current.visible_names(caller.tenant_id):
            found = current.resolve(caller.tenant_id, name)
            assert found is not None, "what is listed resolves"
            model, adapter = found
            cards.append(
                wire.ModelCard(
                    name=name,
                    base=model.name if adapter is not None else "",
                    interface=model.interface.value,
                    context_tokens=model.context_tokens if model.interface is Interface.LLM else 0,
                )
            )
        return wire.ListModelsResponse(models=cards)


def add_to_server(service: NativeService, server: Any) -> str:
    """Register the service; returns its full name."""
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    return str(SERVICE.full_name)


async def _write(context: Any, message: wire.GenerateResponse) -> None:
    """Send one message; raises ClientLeft when it is not taken for `STALL_S_MAX`, and CancelledError as ever."""
    try:
        async with asyncio.timeout(STALL_S_MAX):
            await context.write(message)
    except TimeoutError as error:
        raise ClientLeft from error


def _head(run: Run) -> tuple[tuple[str, str], ...]:
    limits = rate_limit_headers(run.admitted)
    return (
        (REQUEST_ID_HEADER, run.work.request_id),
        *((name.decode(), value.decode()) for name, value in limits),
    )


def _piece(index: int, chunk: EngineChunk) -> wire.GenerateResponse.Piece:
    logprobs = [_logprob(entry) for entry in json.loads(chunk.logprobs)] if chunk.logprobs else []
    return wire.GenerateResponse.Piece(
        index=index, text=chunk.text, finish_reason=chunk.finish_reason or "", logprobs=logprobs
    )


def _logprob(entry: dict[str, Any]) -> wire.TokenLogprob:
    return wire.TokenLogprob(
        token=entry["token"],
        token_bytes=bytes(entry["bytes"] or ()),
        logprob=entry["logprob"],
        top=[_logprob(top) for top in entry.get("top", ())],
    )


def _usage(run: Run) -> wire.TokenUsage:
    return wire.TokenUsage(
        input_tokens=run.input_tokens, cached_tokens=run.cached_tokens, output_tokens=run.output_tokens
    )


def _ended(run: Run) -> wire.GenerateResponse.Ended:
    return wire.GenerateResponse.Ended(
        request_id=run.work.request_id,
        usage=_usage(run),
        first_token_ms=run.first_token_ms or 0,
        **timings(run),
    )

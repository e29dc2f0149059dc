"""Routes of the OpenAI API: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models.

They turn a request into an answer object; what the answer costs and when it ends is not decided here.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from roundhouse.catalogue.store import CatalogueView
from roundhouse.clock import Clock
from roundhouse.errors import NotFound
from services.gateway.adapters.http_edge import EdgeRoute
from services.gateway.adapters.http_requests import RequestReader
from services.gateway.adapters.offload import sized
from services.gateway.adapters.openai_answers import AnswerStyle, EmbeddingAnswer, GenerationAnswer
from services.gateway.adapters.openai_bodies import ChatBody, CompletionBody, EmbeddingBody, parse_body
from services.gateway.adapters.openai_work import OpenAIWork
from services.gateway.operations.resolve_model import model_not_found_text
from services.gateway.operations.run_request import RequestParts

_encode = msgspec.json.Encoder().encode


class OpenAIRoutes:
    """Handlers of the OpenAI API."""

    def __init__(
        self, parts: RequestParts, work: OpenAIWork, catalogue: CatalogueView, reader: RequestReader, clock: Clock
    ) -> None:
        self._parts = parts
        self._work = work
        self._catalogue = catalogue
        self._reader = reader
        self._started_s = clock.now_ms() // 1000

    def routes(self) -> list[BaseRoute]:
        """The route table."""
        return [
            EdgeRoute("/v1/chat/completions", self.chat, methods=["POST"]),
            EdgeRoute("/v1/completions", self.completion, methods=["POST"]),
            EdgeRoute("/v1/embeddings", self.embedding, methods=["POST"]),
            EdgeRoute("/v1/models", self.models, methods=["GET"]),
            EdgeRoute("/v1/models/{model:path}", self.model, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        context = self._reader.context(request)
        data = await self._reader.body(request)
        body = await sized(len(data), parse_body, data, ChatBody)
        prepared = await self._work.chat(body, context)
        style = AnswerStyle(chat=True, stream=body.stream, include_usage=body.include_usage)
        return GenerationAnswer(self._parts, prepared, style)

    async def completion(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        context = self._reader.context(request)
        data = await self._reader.body(request)
        body = await sized(len(data), parse_body, data, CompletionBody)
        prepared = await self._work.completion(body, context)
        style = AnswerStyle(chat=False, stream=body.stream, include_usage=body.include_usage, echo=body.echo)
        return GenerationAnswer(self._parts, prepared, style)

    async def embedding(self, request: Request) -> ASGIApp:
        """POST /v1/embeddings."""
        context = self._reader.context(request)
        data = await self._reader.body(request)
        body = await sized(len(data), parse_body, data, EmbeddingBody)
        prepared = await self._work.embedding(body, context)
        return EmbeddingAnswer(self._parts, prepared, as_base64=body.encoding_format == "base64")

    async def models(self, request: Request) -> Response:
        """GET /v1/models: what this tenant may call."""
        caller = self._reader.inference_caller(request)
        names = self._catalogue.current.visible_names(caller.tenant_id)
        return _json({"object": "list", "data": [self._entry(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        caller = self._reader.inference_caller(request)
        name = request.path_params["model"]
        if self._catalogue.current.resolve(caller.tenant_id, name) is None:
            raise NotFound(model_not_found_text(name), param="model")
        return _json(self._entry(name))

    def _entry(self, name: str) -> dict[str, object]:
        # The catalogue keeps no creation time: the start of this process is when the name was last known to be new.
        return {"id": name, "object": "model", "created": self._started_s, "owned_by": "roundhouse"}


def _json(value: dict[str, object]) -> Response:
    return Response(_encode(value), media_type="application/json")

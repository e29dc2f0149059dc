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
from services.gateway.adapters.idempotent_answers import IdempotentAnswer
from services.gateway.adapters.openai_calls import ENDPOINTS, OpenAICalls
from services.gateway.domain.idempotency import HEADER, checked_key, fingerprint
from services.gateway.operations.answer_ports import AnswerStore
from services.gateway.operations.resolve_model import model_not_found_text

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class OpenAIRoutes:
    """Handlers of the OpenAI API."""

    def __init__(
        self,
        calls: OpenAICalls,
        catalogue: CatalogueView,
        reader: RequestReader,
        clock: Clock,
        answers: AnswerStore | None = None,
    ) -> None:
        """`answers` None: an `Idempotency-Key` is ignored."""
        self._calls = calls
        self._catalogue = catalogue
        self._reader = reader
        self._clock = clock
        self._answers = answers
        self._started_s = clock.now_ms() // 1000

    def routes(self) -> list[BaseRoute]:
        """The route table."""
        return [
            *(EdgeRoute(endpoint, self.call, methods=["POST"]) for endpoint in ENDPOINTS),
            EdgeRoute("/v1/models", self.models, methods=["GET"]),
            EdgeRoute("/v1/models/{model:path}", self.model, methods=["GET"]),
        ]

    async def call(self, request: Request) -> ASGIApp:
        """POST to one of `ENDPOINTS`; with an `Idempotency-Key` it is run once."""
        context = self._reader.context(request)
        data = await self._reader.body(request)
        endpoint = request.scope["state"]["route"]
        answer = await self._calls.answer(endpoint, data, context)
        key = request.headers.get(HEADER)
        if key is None or self._answers is None:
            return answer
        same = _encode_sorted(msgspec.json.decode(data))
        return IdempotentAnswer(
            answer, self._answers, self._clock, context, checked_key(key), fingerprint(endpoint, same)
        )

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

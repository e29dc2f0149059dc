"""Routes of /v1/batches, as the OpenAI client uses them: create, list, retrieve, cancel."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from roundhouse.errors import InvalidInput
from services.gateway.adapters.http_edge import EdgeRoute
from services.gateway.adapters.http_requests import RequestReader
from services.gateway.adapters.openai_calls import ENDPOINTS
from services.gateway.adapters.openai_files import PAGE_DEFAULT, PAGE_MAX, json_response, list_json, page_of
from services.gateway.domain.batches import batch_json
from services.gateway.operations.batches import BatchOperations, BatchWish


class BatchBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchRoutes:
    """Handlers of /v1/batches."""

    def __init__(self, operations: BatchOperations, reader: RequestReader) -> None:
        self._operations = operations
        self._reader = reader

    def routes(self) -> list[BaseRoute]:
        """The route table."""
        return [
            EdgeRoute("/v1/batches", self.batches, methods=["GET", "POST"]),
            EdgeRoute("/v1/batches/{batch_id}", self.batch, methods=["GET"]),
            EdgeRoute("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def batches(self, request: Request) -> Response:
        """GET and POST /v1/batches."""
        caller = self._reader.inference_caller(request)
        if request.method == "POST":
            body = _parsed(await self._reader.body(request))
            wish = BatchWish(body.input_file_id, body.endpoint, body.completion_window, body.metadata or {})
            return json_response(batch_json(await self._operations.create(caller, wish, ENDPOINTS)))
        found = await self._operations.all_batches(caller)
        ids = [batch.batch_id for batch in found]
        page, more = page_of(request, found, ids, default=PAGE_DEFAULT, most=PAGE_MAX)
        return json_response(list_json([batch_json(batch) for batch in page], more))

    async def batch(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        caller = self._reader.inference_caller(request)
        return json_response(batch_json(await self._operations.batch(caller, request.path_params["batch_id"])))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        caller = self._reader.inference_caller(request)
        return json_response(batch_json(await self._operations.cancel(caller, request.path_params["batch_id"])))


def _parsed(data: bytes) -> BatchBody:
    try:
        return msgspec.json.decode(data, type=BatchBody)
    except msgspec.ValidationError as error:
        text = str(error)
        named = text.rpartition("field `")[2].partition("`")[0] if "field `" in text else ""
        where = text.rpartition("`$.")[2].partition("`")[0] if "`$." in text else ""
        raise InvalidInput(text, param=named or where or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput("The body is not valid JSON.") from error

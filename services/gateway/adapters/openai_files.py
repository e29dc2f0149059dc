"""Routes of /v1/files, as the OpenAI client uses them: upload, list, retrieve, content, delete.

Uploads and contents pass through temporary files on this machine, never whole through memory.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from roundhouse.errors import InvalidInput
from services.gateway.adapters.http_edge import EdgeRoute
from services.gateway.adapters.http_errors import BodyTooLarge
from services.gateway.adapters.http_requests import DIGITS_MAX, RequestReader
from services.gateway.domain.batches import file_json
from services.gateway.domain.outcomes import ClientLeft
from services.gateway.operations.batches import BatchOperations, Upload

FORM_BYTES = 64 * 1024  # what the form may have beside the file
CHUNK_BYTES = 256 * 1024
PAGE_DEFAULT, PAGE_MAX = 20, 100  # OpenAI, batches
FILES_PAGE_MAX = 10_000  # OpenAI, files

_encode = msgspec.json.Encoder().encode
Item = TypeVar("Item")


class FileRoutes:
    """Handlers of /v1/files."""

    def __init__(self, operations: BatchOperations, reader: RequestReader, *, file_bytes_max: int) -> None:
        self._operations = operations
        self._reader = reader
        self._file_bytes_max = file_bytes_max

    def routes(self) -> list[BaseRoute]:
        """The route table."""
        return [
            EdgeRoute("/v1/files", self.files, methods=["GET", "POST"]),
            EdgeRoute("/v1/files/{file_id}", self.file, methods=["GET", "DELETE"]),
            EdgeRoute("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def files(self, request: Request) -> Response:
        """GET and POST /v1/files."""
        caller = self._reader.inference_caller(request)
        if request.method == "POST":
            return json_response(file_json(await self._upload(request)))
        purpose = request.query_params.get("purpose")
        found = [file for file in await self._operations.all_files(caller) if purpose in (None, file.purpose)]
        if order_of(request) == "asc":
            found.reverse()
        page, more = page_of(
            request, found, [file.file_id for file in found], default=FILES_PAGE_MAX, most=FILES_PAGE_MAX
        )
        return json_response(list_json([file_json(file) for file in page], more))

    async def file(self, request: Request) -> Response:
        """GET and DELETE /v1/files/{file_id}."""
        caller, file_id = self._reader.inference_caller(request), request.path_params["file_id"]
        if request.method == "DELETE":
            await self._operations.delete_file(caller, file_id)
            return json_response({"id": file_id, "object": "file", "deleted": True})
        return json_response(file_json(await self._operations.file(caller, file_id)))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content."""
        caller = self._reader.inference_caller(request)
        target = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - the answer closes it
        try:
            file = await self._operations.read_file(caller, request.path_params["file_id"], target)
        except BaseException:
            target.close()
            raise
        headers = {"content-length": str(file.size)}
        return StreamingResponse(_content(target), media_type="application/octet-stream", headers=headers)

    async def _upload(self, request: Request) -> Any:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidInput("The body must be multipart/form-data with 'file' and 'purpose'.", param="file")
        parser = MultiPartParser(request.headers, self._bounded(request), max_files=1, max_fields=8)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, UnicodeDecodeError) as error:
            raise InvalidInput("The body is no valid form.") from error
        except ClientDisconnect as error:
            raise ClientLeft from error
        async with form_closed(form):
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or file.size is None:
                raise InvalidInput("There is no file.", param="file")
            if not isinstance(purpose, str):
                raise InvalidInput("There is no purpose.", param="purpose")
            if file.size > self._file_bytes_max:
                raise self._too_large()
            seconds = _seconds(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
            upload = Upload(file.filename or "", purpose, file.size, file.file, seconds)
            return await self._operations.upload(self._reader.inference_caller(request), upload)

    async def _bounded(self, request: Request) -> AsyncGenerator[bytes, None]:
        limit = self._file_bytes_max + FORM_BYTES
        announced = request.headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > limit:
            raise self._too_large()
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise self._too_large()
            yield piece

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"A file may have at most {self._file_bytes_max} bytes.", code="file_too_large")


class form_closed:  # noqa: N801 - a context manager
    """Closes a form's temporary files."""

    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> None:
        """Nothing to do."""

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self._form.close()


async def _content(source: BinaryIO) -> AsyncIterator[bytes]:
    with source:
        source.seek(0)
        while piece := await asyncio.to_thread(source.read, CHUNK_BYTES):
            yield piece


def _seconds(anchor: Any, seconds: Any) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or not (isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 12):
        raise InvalidInput("must have the anchor 'created_at' and a number of seconds", param="expires_after")
    return int(seconds)


def order_of(request: Request) -> str:
    """`order` of a list: desc (the default) or asc. Raises InvalidInput."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("must be 'asc' or 'desc'", param="order")
    return order


def page_of(
    request: Request, items: Sequence[Item], ids: Sequence[str], *, default: int, most: int
) -> tuple[Sequence[Item], bool]:
    """The page that `limit` and `after` ask for, and whether more follow. Raises InvalidInput."""
    text = request.query_params.get("limit", str(default))
    if not (text.isdecimal() and len(text) <= DIGITS_MAX and 1 <= int(text) <= most):
        raise InvalidInput(f"must be 1 to {most}", param="limit")
    after, begin = request.query_params.get("after"), 0
    if after is not None:
        if after not in ids:
            raise InvalidInput("there is no such item to go on after", param="after")
        begin = list(ids).index(after) + 1
    end = begin + int(text)
    return items[begin:end], end < len(items)


def list_json(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}


def json_response(value: object) -> Response:
    """A whole JSON answer."""
    return Response(_encode(value), media_type="application/json")

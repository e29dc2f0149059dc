"""`LineRunner`: a line of a batch goes through the same calls as a request over HTTP, in the batch class."""

import asyncio
from typing import Any

import msgspec
from starlette.types import Message

from roundhouse.errors import RoundhouseError
from services.gateway.adapters.http_errors import http_status, internal_error, openai_error
from services.gateway.adapters.openai_calls import OpenAICalls
from services.gateway.adapters.request_ids import new_request_id
from services.gateway.domain.batches import Batch
from services.gateway.domain.keys import INFERENCE
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.operations.run_batch import LineAnswer, retry_of
from services.gateway.ports import Caller


class CallLines:
    """See the module. `calls` must be those of the batch class."""

    def __init__(self, calls: OpenAICalls) -> None:
        self._calls = calls

    async def run(self, batch: Batch, body: bytes, deadline_unix_ms: int) -> LineAnswer:
        """See `LineRunner.run`."""
        submitter = batch.submitter
        caller = Caller(
            tenant_id=batch.tenant_id,
            key_id=submitter.key_id,
            scopes=frozenset({INFERENCE}),
            key_hash=submitter.key_hash,
            limits=submitter.limits,
            family=submitter.family,
        )
        context = RequestContext(new_request_id(), caller, deadline_unix_ms)
        try:
            answer = await self._calls.answer(batch.endpoint, body, context, may_stream=False)
        except RoundhouseError as error:
            status = http_status(error)
            return LineAnswer(status, context.request_id, openai_error(error), retry_of(error, status))
        heard = _Heard()
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": batch.endpoint, "headers": [], "state": {}}
        await answer(scope, _never_leaves, heard)
        return heard.answer(context.request_id)


class _Heard:
    """`send` that keeps the answer."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            self._headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")

    def answer(self, request_id: str) -> LineAnswer:
        """The answer as a line's; one that never came is a fault of ours."""
        if self._status == 0:
            return LineAnswer(500, request_id, openai_error(internal_error()), 0)
        body = msgspec.json.decode(bytes(self._body))
        return LineAnswer(self._status, request_id, body, self._retry())

    def _retry(self) -> int | None:
        told = self._headers.get("retry-after-ms")
        if told is not None:
            return int(told)
        return 0 if self._status >= 500 else None


async def _never_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")

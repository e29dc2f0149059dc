"""Answers of the OpenAI API: runs the work while the client is there, and writes what comes as events or as one body.

A stream's header goes out with its first chunk or its first waiting comment, so that a refusal before that has its own
status. After the header a failure is exactly one `error` event, without a finish chunk and without [DONE] (case B29).
"""

import base64
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from roundhouse.errors import RoundhouseError
from services.gateway.adapters.client_connection import Sender, while_connected
from services.gateway.adapters.http_edge import fault_fields
from services.gateway.adapters.http_errors import error_response, internal_error, openai_error
from services.gateway.adapters.openai_work import Prepared
from services.gateway.adapters.rate_headers import rate_limit_headers, served_by, timing_headers, timings
from services.gateway.domain.openai_chunks import (
    DONE,
    ChunkWriter,
    answer_id,
    chat_logprobs,
    comment,
    completion_logprobs,
    echoed_logprobs,
    event,
    joined_logprobs,
    usage_of,
)
from services.gateway.domain.outcomes import ClientLeft, ServedByOther
from services.gateway.operations.run import Run, Waiting
from services.gateway.operations.run_request import RequestParts, run_request
from services.gateway.ports import EngineChunk

log = structlog.get_logger(__name__)

_encode = msgspec.json.Encoder().encode
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """What shape a generation's answer has."""

    chat: bool
    stream: bool
    include_usage: bool
    echo: bool = False


class GenerationAnswer:
    """ASGI answer of a chat or completion request."""

    def __init__(self, parts: RequestParts, prepared: Prepared, style: AnswerStyle) -> None:
        self._parts = parts
        self._prepared = prepared
        self._work = prepared.work
        self._style = style
        self._created_s = parts.clock.now_ms() // 1000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. Returns when it is settled, also if the client left."""
        sender = Sender(send)
        await while_connected(receive, answered(self._produce, sender, scope, receive, send), sender, scope)

    async def _produce(self, sender: Sender) -> None:
        produce = self._stream if self._style.stream else self._whole
        try:
            await produce(sender)
        except ServedByOther as other:  # raised before the header is out, and only once: fallbacks do not chain
            assert self._prepared.instead is not None, "only such a request is redirected"
            log.info("served_by_fallback", request_id=self._work.request_id, model=self._work.name, by=other.model)
            self._prepared = await self._prepared.instead(other.model)
            self._work = self._prepared.work
            await produce(sender)

    async def _stream(self, sender: Sender) -> None:
        writer = ChunkWriter(
            chat=self._style.chat,
            request_id=self._work.request_id,
            created_s=self._created_s,
            model=self._work.name,
            with_usage=self._style.include_usage,
        )
        texts = _Texts(self._prepared, self._style)
        async with run_request(self._parts, self._work) as run:
            async for piece in run.events():
                if not sender.started:
                    limits = rate_limit_headers(run.admitted)
                    await sender.start(200, _EVENT_STREAM + limits + served_by(run))
                if isinstance(piece, Waiting):
                    await sender.body(comment(_waiting_text(piece)))
                elif isinstance(piece.piece, EngineChunk):
                    data = texts.events(writer, piece.index, piece.piece, first=not piece.seen_before)
                    if data:
                        await sender.body(data)
            await sender.body(self._stream_end(writer, run), more=False)

    def _stream_end(self, writer: ChunkWriter, run: Run) -> bytes:
        usage = b""
        if self._style.include_usage:
            usage = writer.usage(usage_of(run.input_tokens, run.output_tokens, run.cached_tokens))
        times = timings(run) | {"first_token_ms": run.first_token_ms or 0}
        return usage + comment("roundhouse " + " ".join(f"{name}={value}" for name, value in times.items())) + DONE

    async def _whole(self, sender: Sender) -> None:
        texts = _Texts(self._prepared, self._style)
        async with run_request(self._parts, self._work) as run:
            async for piece in run.events():
                if not isinstance(piece, Waiting) and isinstance(piece.piece, EngineChunk):
                    texts.add(piece.index, piece.piece)
            body = {
                "id": answer_id(self._work.request_id, chat=self._style.chat),
                "object": "chat.completion" if self._style.chat else "text_completion",
                "created": self._created_s,
                "model": self._work.name,
                "choices": texts.choices(),
                "usage": usage_of(run.input_tokens, run.output_tokens, run.cached_tokens),
            }
            await send_json(sender, run, _encode(body))


class EmbeddingAnswer:
    """ASGI answer of an embedding request."""

    def __init__(self, parts: RequestParts, prepared: Prepared, *, as_base64: bool) -> None:
        self._parts = parts
        self._work = prepared.work
        self._as_base64 = as_base64

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. Returns when it is settled, also if the client left."""
        sender = Sender(send)
        await while_connected(receive, answered(self._whole, sender, scope, receive, send), sender, scope)

    async def _whole(self, sender: Sender) -> None:
        vectors: dict[int, tuple[float, ...]] = {}
        async with run_request(self._parts, self._work) as run:
            async for piece in run.events():
                if not isinstance(piece, Waiting) and isinstance(piece.piece, EngineChunk) and piece.piece.embedding:
                    vectors[piece.index] = piece.piece.embedding
            data = [
                {"object": "embedding", "index": index, "embedding": self._shaped(vectors.get(index, ()))}
                for index in range(len(self._work.calls))
            ]
            usage = {"prompt_tokens": run.input_tokens, "total_tokens": run.input_tokens}
            body = {"object": "list", "data": data, "model": self._work.name, "usage": usage}
            await send_json(sender, run, _encode(body))

    def _shaped(self, vector: tuple[float, ...]) -> str | tuple[float, ...]:
        if not self._as_base64:
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


async def send_json(sender: Sender, run: Run, body: bytes) -> None:
    """Send a whole answer with the limits and times of its run."""
    length = (b"content-length", str(len(body)).encode())
    limits = rate_limit_headers(run.admitted)
    await sender.start(200, [_JSON, length, *limits, *timing_headers(run), *served_by(run)])
    await sender.body(body, more=False)


async def answered(
    produce: Callable[[Sender], Awaitable[None]], sender: Sender, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `produce` and tell the client of its failure: by status if the header is not out yet, else by one event."""
    try:
        await produce(sender)
        return
    except ClientLeft:
        return
    except RoundhouseError as raised:
        error = raised
    except Exception as fault:  # noqa: BLE001 - the client hears that it was our fault
        log.error("answer_failed", **fault_fields(fault))
        error = internal_error()
    if not sender.started:
        await error_response(error, scope["path"])(scope, receive, send)
    else:
        await sender.last_words(event(openai_error(error)))


class _Texts:
    """The text of every choice: as events while it comes, or gathered."""

    def __init__(self, prepared: Prepared, style: AnswerStyle) -> None:
        self._style = style
        self._prompts = prepared.prompts
        self._choices = prepared.work.choices
        count = len(prepared.work.calls)
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._lengths = [len(self._prompt_of(index)) if style.echo else 0 for index in range(count)]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._reasons: list[str | None] = [None] * count

    def events(self, writer: ChunkWriter, index: int, chunk: EngineChunk, *, first: bool) -> bytes:
        """The events for one chunk of one choice."""
        data = b""
        if first:
            if self._style.chat:
                data = writer.role(index)
            elif self._style.echo:
                data = writer.text(index, self._prompt_of(index), self._echoed(index, chunk))
        logprobs = self._shaped(index, chunk)
        if chunk.text or logprobs is not None:
            data += writer.text(index, chunk.text, logprobs)
        self._lengths[index] += len(chunk.text)
        if chunk.finish_reason is not None:
            data += writer.finish(index, chunk.finish_reason)
        return data

    def add(self, index: int, chunk: EngineChunk) -> None:
        """Gather one chunk of one choice."""
        if self._style.echo and not self._logprobs[index] and (echoed := self._echoed(index, chunk)) is not None:
            self._logprobs[index].append(echoed)
        self._texts[index].append(chunk.text)
        logprobs = self._shaped(index, chunk)
        if logprobs is not None:
            self._logprobs[index].append(logprobs)
        self._lengths[index] += len(chunk.text)
        self._reasons[index] = chunk.finish_reason or self._reasons[index]

    def choices(self) -> list[dict[str, Any]]:
        """The choices of a whole answer."""
        return [self._choice(index) for index in range(len(self._texts))]

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts[index])
        if self._style.echo:
            text = self._prompt_of(index) + text
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": joined_logprobs(self._logprobs[index]),
            "finish_reason": self._reasons[index],
        }
        if self._style.chat:
            return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return choice | {"text": text}

    def _prompt_of(self, index: int) -> str:
        return self._prompts[index // self._choices].text

    def _echoed(self, index: int, chunk: EngineChunk) -> dict[str, Any] | None:
        """The log probabilities of the prompt, which come with the first chunk."""
        return echoed_logprobs(chunk.prompt_logprobs, self._prompt_of(index)) if chunk.prompt_logprobs else None

    def _shaped(self, index: int, chunk: EngineChunk) -> dict[str, Any] | None:
        if not chunk.logprobs:
            return None
        if self._style.chat:
            return chat_logprobs(chunk.logprobs, 0)
        return completion_logprobs(chunk.logprobs, self._lengths[index])


def _waiting_text(waiting: Waiting) -> str:
    return f"waiting stage={waiting.stage} position={waiting.position} estimated_ms={waiting.estimated_ms}"

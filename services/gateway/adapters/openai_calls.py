"""From the body of an OpenAI call to its answer, for whoever has one: a route, a line of a batch.

What the answer costs and when it ends is not decided here.
"""

from dataclasses import replace

import msgspec
from starlette.types import ASGIApp

from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import PriorityClass
from services.gateway.adapters.offload import sized
from services.gateway.adapters.openai_answers import AnswerStyle, EmbeddingAnswer, GenerationAnswer
from services.gateway.adapters.openai_bodies import ChatBody, CompletionBody, EmbeddingBody, parse_body
from services.gateway.adapters.openai_work import OpenAIWork, Prepared
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.operations.run_request import RequestParts

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)
FLEX = "flex"  # OpenAI's word for work that may wait


class OpenAICalls:
    """Makes answers. Nothing is spent before an answer is run (invariant 15)."""

    def __init__(self, parts: RequestParts, work: OpenAIWork) -> None:
        self._parts = parts
        self._work = work

    async def answer(self, endpoint: str, data: bytes, context: RequestContext, *, may_stream: bool = True) -> ASGIApp:
        """The answer of one of `ENDPOINTS`. Raises InvalidInput, NotFound, Unauthenticated, Unavailable."""
        match endpoint:
            case "/v1/chat/completions":
                chat = await sized(len(data), parse_body, data, ChatBody)
                _check_stream(chat.stream, may_stream)
                style = AnswerStyle(chat=True, stream=chat.stream, include_usage=chat.include_usage)
                prepared = await self._work.chat(chat, context)
                return GenerationAnswer(self._parts, _in_tier(prepared, chat.service_tier), style)
            case "/v1/completions":
                bare = await sized(len(data), parse_body, data, CompletionBody)
                _check_stream(bare.stream, may_stream)
                style = AnswerStyle(chat=False, stream=bare.stream, include_usage=bare.include_usage, echo=bare.echo)
                prepared = await self._work.completion(bare, context)
                return GenerationAnswer(self._parts, _in_tier(prepared, bare.service_tier), style)
            case "/v1/embeddings":
                body = await sized(len(data), parse_body, data, EmbeddingBody)
                prepared = await self._work.embedding(body, context)
                return EmbeddingAnswer(self._parts, prepared, as_base64=body.encoding_format == "base64")
        raise InvalidInput("There is no such endpoint.", param="endpoint")


def _in_tier(prepared: Prepared, tier: str | None) -> Prepared:
    """The work in the class that the caller chose: `flex` gives way to everybody else; nobody gets ahead by asking."""
    if tier != FLEX:
        return prepared
    tenant = msgspec.structs.replace(prepared.work.tenant, priority_class=PriorityClass.BATCH)
    return replace(prepared, work=replace(prepared.work, tenant=tenant))


def _check_stream(stream: bool, may_stream: bool) -> None:
    if stream and not may_stream:
        raise InvalidInput("'stream' is not supported here.", code="unsupported_parameter", param="stream")

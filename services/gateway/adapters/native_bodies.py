"""Messages of `roundhouse.v1.Inference` as the bodies that the OpenAI edge checks: one set of rules for both.

Nothing is checked here but what only protobuf can get wrong; names of parameters in refusals are the OpenAI ones, which
are also the names of the fields.
"""

from typing import Any

import msgspec

from roundhouse.errors import InvalidInput
from roundhouse.wire.v1 import inference_pb2 as wire
from services.gateway.adapters.openai_bodies import ChatBody, CompletionBody, EmbeddingBody

_NUMBERS = (
    *("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "seed", "ignore_eos"),
)


def chat_body(request: wire.GenerateRequest) -> ChatBody:
    """The chat that is asked for. Raises InvalidInput for JSON that is none."""
    return ChatBody(
        model=request.model,
        messages=[_message(message) for message in request.chat.messages],
        tools=_json_list(request.chat.tools_json, "tools_json") or None,
        logprobs=request.return_logprobs or None,
        top_logprobs=request.top_logprobs or None,
        stream=True,
        **_sampling(request.sampling),
    )


def completion_body(request: wire.GenerateRequest) -> CompletionBody:
    """The bare prompt that is asked for. Raises InvalidInput if there is no input at all."""
    match request.WhichOneof("input"):
        case "text":
            prompt: str | list[Any] = request.text
        case "token_ids":
            prompt = list(request.token_ids.ids)
        case _:
            raise InvalidInput("one of 'chat', 'text' and 'token_ids' is needed.", param="input")
    if request.top_logprobs and not request.return_logprobs:
        raise InvalidInput("'top_logprobs' needs 'return_logprobs'.", param="top_logprobs")
    return CompletionBody(
        model=request.model,
        prompt=prompt,
        logprobs=request.top_logprobs if request.return_logprobs else None,
        stream=True,
        **_sampling(request.sampling),
    )


def embedding_body(request: wire.EmbedRequest) -> EmbeddingBody:
    """The inputs to embed; a mixture of kinds is refused later, with the other wrong shapes."""
    inputs: list[Any] = [
        one.text if one.WhichOneof("input") == "text" else list(one.token_ids.ids) for one in request.inputs
    ]
    return EmbeddingBody(model=request.model, input=inputs)


def _sampling(options: wire.SamplingOptions) -> dict[str, Any]:
    given = {field.name: value for field, value in options.ListFields()}
    fields: dict[str, Any] = {name: given[name] for name in _NUMBERS if name in given}
    fields["stop"] = list(options.stop) or None
    fields["stop_token_ids"] = list(options.stop_token_ids) or None
    fields["logit_bias"] = {str(token): bias for token, bias in options.logit_bias.items()} or None
    return fields


def _message(message: wire.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            fields[name] = value
    if calls := _json_list(message.tool_calls_json, "tool_calls_json"):
        fields["tool_calls"] = calls
    return fields


def _json_list(text: str, param: str) -> list[dict[str, Any]]:
    if not text:
        return []
    try:
        return msgspec.json.decode(text, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"'{param}' must be a JSON list of objects.", param=param) from error

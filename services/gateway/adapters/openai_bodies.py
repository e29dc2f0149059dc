"""Bodies of the OpenAI API, parsed once and checked before anything is spent.

Explicit nulls count as absent (case B02). Fields that change the meaning of an answer and are not supported are refused
by name; the ones of `ACCEPTED_WITHOUT_EFFECT`, and unknown ones, are ignored: a tenant named in a body stays a word
(case B07). Field names are OpenAI's, plus those sampling parameters that vLLM's server takes as extra fields.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec

from roundhouse.errors import InvalidInput
from services.gateway.domain.sampling import (
    COMPLETION_LOGPROBS_MAX,
    TOP_LOGPROBS_MAX,
    Sampling,
    check_ranges,
    logit_bias_of,
    max_tokens_of,
    stop_strings,
)

ACCEPTED_WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "prompt_cache_key", "safety_identifier"})
MESSAGES_MAX = 4096  # a guess: far above any conversation, below what makes templates slow
PROMPTS_MAX = 128  # a guess: prompts of one completion request
EMBEDDING_INPUTS_MAX = 2048  # OpenAI

# Field → the values that mean what we do anyway; anything else is refused.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
    "dimensions": (),
}


Prompts = str | list[str | int | list[int]]
"""A text, texts, the token ids of one prompt, or those of several; `prompts_of` refuses a mixture."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class _SamplingFields(msgspec.Struct, kw_only=True):
    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    service_tier: str | None = None  # `flex`: the batch class; every other one: the tenant's own

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """The sampling parameters, checked. Raises InvalidInput."""
        check_ranges({name: getattr(self, name) for name in _NUMBERS})
        if self.stream_options is not None and not self.stream:
            raise InvalidInput("'stream_options' is only allowed with 'stream': true.", param="stream_options")
        return Sampling(
            max_tokens=max_tokens,
            n=self.n or 1,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=self.seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logit_bias=logit_bias_of(self.logit_bias),
            logprobs=logprobs,
        )


_NUMBERS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)


class ChatBody(_SamplingFields, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def checked_sampling(self) -> Sampling:
        """See `_SamplingFields.sampling`."""
        limit = max_tokens_of(self.max_tokens, self.max_completion_tokens)
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise InvalidInput("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
            if not 0 <= self.top_logprobs <= TOP_LOGPROBS_MAX:
                raise InvalidInput(f"'top_logprobs' must be in [0, {TOP_LOGPROBS_MAX}].", param="top_logprobs")
        return self.sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)

    def checked_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the template; raises InvalidInput for a choice that cannot be forced on a model."""
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidInput("Only 'none' and 'auto' are supported.", param="tool_choice")
        return None if self.tool_choice == "none" or not self.tools else self.tools


class CompletionBody(_SamplingFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    def checked_sampling(self) -> Sampling:
        """See `_SamplingFields.sampling`."""
        if self.logprobs is not None and not 0 <= self.logprobs <= COMPLETION_LOGPROBS_MAX:
            raise InvalidInput(f"'logprobs' must be in [0, {COMPLETION_LOGPROBS_MAX}].", param="logprobs")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidInput("'best_of' is only supported equal to 'n'.", param="best_of")
        sampling = self.sampling(self.max_tokens, self.logprobs)
        return replace(sampling, prompt_logprobs=self.logprobs) if self.echo else sampling


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of /v1/embeddings."""

    model: str
    input: Prompts
    encoding_format: str = "float"

    def check(self) -> None:
        """Raises InvalidInput for an unknown encoding (case B01)."""
        if self.encoding_format not in ("float", "base64"):
            raise InvalidInput("'encoding_format' must be 'float' or 'base64'.", param="encoding_format")


Body = TypeVar("Body", ChatBody, CompletionBody, EmbeddingBody)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Parse a body; raises InvalidInput with the field as `param` where one is to blame."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput("The body is not valid JSON.") from error
    if not isinstance(raw, dict):
        raise InvalidInput("The body must be a JSON object.")
    fields = {name: value for name, value in raw.items() if value is not None}
    for name, harmless in _UNSUPPORTED.items():
        if name in fields and fields[name] not in harmless:
            raise InvalidInput(f"'{name}' is not supported.", code="unsupported_parameter", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise InvalidInput(text, param=_param_of(text)) from error


def _param_of(text: str) -> str | None:
    """The field in msgspec's words: "… - at `$.messages[0]`" or "… missing required field `model`"."""
    where = text.rpartition("`$.")[2].partition("`")[0] if "`$." in text else ""
    if where:
        return where
    return text.rpartition("field `")[2].partition("`")[0] or None if "field `" in text else None


def prompts_of(value: Prompts, *, param: str, at_most: int) -> list[str | list[int]]:
    """The prompts in a `prompt` or `input` field, each a string or a list of token ids. Raises InvalidInput."""
    entries = [value] if isinstance(value, str) else value
    kinds = {type(entry) for entry in entries}
    if len(kinds) > 1:
        raise InvalidInput(f"'{param}' must be all strings or all token ids.", param=param)
    prompts = cast("list[str | list[int]]", [entries] if kinds == {int} else entries)
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise InvalidInput(f"'{param}' must not be empty.", param=param)
    if len(prompts) > at_most:
        raise InvalidInput(f"'{param}' takes at most {at_most} entries.", param=param)
    return prompts


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content as text, as chat templates want it. Raises InvalidInput."""
    if not 0 < len(messages) <= MESSAGES_MAX:
        raise InvalidInput(f"'messages' must have 1 to {MESSAGES_MAX} entries.", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidInput(f"the role must be one of {', '.join(_ROLES)}.", param=f"{place}.role")
    if "content" not in fields and not (role == "assistant" and "tool_calls" in fields):
        raise InvalidInput("a message needs content.", param=f"{place}.content")
    fields["content"] = _content(fields.get("content", ""), f"{place}.content")
    fields["role"] = "system" if role == "developer" else role  # OpenAI's newer word for the same
    return fields


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput("content must be a string or a list of text parts.", param=place)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidInput("only parts of type 'text' are supported.", param=place)
        texts.append(part["text"])
    return "".join(texts)

"""Whether a prompt and its answer fit the model, decided before the request is queued (case B13).

An instance can hold no more than its KV pool, so the window is the smaller of the context and the pool.
"""

from roundhouse.catalogue.records import Model
from roundhouse.errors import InvalidInput

CHAT_OUTPUT_TOKENS_DEFAULT = 4096  # a guess: long answers pass, and quota reservations stay bounded
COMPLETION_OUTPUT_TOKENS_DEFAULT = 16  # OpenAI, completions


def window_tokens(model: Model) -> int | None:
    """Tokens of prompt and answer that fit; None when the model states no limit."""
    limits = [limit for limit in (model.context_tokens, model.kv_pool_tokens) if limit > 0]
    return min(limits) if limits else None


def output_limit(model: Model, *, prompt_tokens: int, asked: int | None, default: int, param: str) -> int:
    """Tokens that the answer may have: what was asked, else `default` as far as the window has room.

    Raises InvalidInput `context_length_exceeded` when prompt and answer cannot fit together."""
    window = window_tokens(model)
    if window is None:
        return asked if asked is not None else default
    room = window - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        answer = "" if asked is None else f" and {asked} in the completion"
        raise InvalidInput(
            f"This model's maximum context length is {window} tokens; you asked for {prompt_tokens} tokens in the "
            f"input{answer}. Reduce the length of the input or the completion.",
            code="context_length_exceeded",
            param=param,
        )
    return asked if asked is not None else min(default, room)


def check_input(model: Model, *, prompt_tokens: int, param: str) -> None:
    """Raise InvalidInput `context_length_exceeded` for an input (of an embedding) that does not fit."""
    window = window_tokens(model)
    if window is not None and prompt_tokens > window:
        raise InvalidInput(
            f"This model's maximum context length is {window} tokens; the input has {prompt_tokens}.",
            code="context_length_exceeded",
            param=param,
        )

"""Joins the events of one request into the output tensors of one response, as plain values.

`finish_reason` is `"null"` until the last response, then `"stop"`, `"length"` or, after a prefill, `"handoff"`.
`num_output_tokens` counts the tokens generated since the previous response, so their sum is the bill; `token_ids`, if
asked for, are those tokens. `roundhouse` comes with the first and the last one; the first has the log probabilities of
the prompt's tokens, if they were asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.reference.intake import Call
from engines.reference.sampler import TokenLogprobs
from engines.reference.sequence import TokenGenerated
from engines.reference.token_bytes import TokenText


@dataclass(frozen=True, slots=True)
class ResponseValues:
    """One response; None for an output that is left out."""

    text_output: str
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    logprobs: str | None = None
    embedding: NDArray[np.float32] | None = None
    roundhouse: str | None = None
    token_ids: NDArray[np.int32] | None = None


def join_tokens(call: Call, tokens: TokenText, events: Sequence[TokenGenerated], first: bool) -> ResponseValues:
    """One response for `events`, which are in order; `first` when none was sent before."""
    inputs, last = call.inputs, events[-1]
    text = "".join(event.text for event in events)
    if first and not inputs.exclude_input_in_output:
        text = inputs.text_input + text
    return ResponseValues(
        text_output=text,
        finish_reason=(last.finish or "null") if inputs.return_finish_reason else None,
        num_input_tokens=len(call.request.prompt) if inputs.return_num_input_tokens else None,
        num_output_tokens=len(events) if inputs.return_num_output_tokens else None,
        logprobs=_logprobs(tokens, events) if inputs.return_logprobs else None,
        roundhouse=_account(last, _prompt_logprobs(call, tokens, events[0])) if first or last.finish else None,
        token_ids=np.array([e.token_id for e in events], np.int32) if call.details.return_token_ids else None,
    )


def _account(event: TokenGenerated, prompt_logprobs: list[dict[str, Any]]) -> str:
    timings = event.timings
    account: dict[str, Any] = {
        "cached_tokens": event.cached_tokens,
        "queue_ms": round(timings.queue_ms, 3),
        "prefill_ms": round(timings.prefill_ms, 3),
        "decode_ms": round(timings.decode_ms, 3),
    }
    return json.dumps(account | ({"prompt_logprobs": prompt_logprobs} if prompt_logprobs else {}))


def _prompt_logprobs(call: Call, tokens: TokenText, event: TokenGenerated) -> list[dict[str, Any]]:
    """One entry a prompt token; nothing goes before the first, so it has none of its own."""
    request = call.request
    if not request.scores_prompt or (len(request.prompt) > 1 and not event.prompt_logprobs):
        return []
    first: dict[str, Any] = {**_entry(tokens, request.prompt[0], 0.0), "logprob": None, "top": []}
    scored = zip(request.prompt[1:], event.prompt_logprobs, strict=True)
    return [first, *(_scored(tokens, token_id, logprobs) for token_id, logprobs in scored)]


def _logprobs(tokens: TokenText, events: Sequence[TokenGenerated]) -> str:
    return json.dumps([_token_logprobs(tokens, event) for event in events])


def _token_logprobs(tokens: TokenText, event: TokenGenerated) -> dict[str, Any]:
    assert event.logprobs is not None  # asked for, so computed
    return _scored(tokens, event.token_id, event.logprobs)


def _scored(tokens: TokenText, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    entry = _entry(tokens, token_id, logprobs.chosen)
    entry["top"] = [_entry(tokens, each, logprob) for each, logprob in logprobs.top]
    return entry


def _entry(tokens: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokens.bytes_of(token_id)
    text = data.decode("utf-8", "replace")
    return {"id": token_id, "token": text, "bytes": list(data), "logprob": max(logprob, LOGPROB_MIN)}


LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI writes this for a token that is all but impossible

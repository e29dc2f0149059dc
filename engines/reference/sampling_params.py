"""Sampling parameters of a request, checked before the request can reach the step loop.

Names and meanings are those of vLLM's `SamplingParams`, because the tensor contract is that of Triton's vLLM backend.
An unknown name is refused: a parameter that is silently ignored gives wrong answers that look right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LOGPROBS_MAX = 20  # OpenAI's limit for top_logprobs
STOP_STRINGS_MAX = 16  # a guess; OpenAI allows 4
STOP_STRING_CHARACTERS_MAX = 1024  # a guess: text is held back up to this length
LOGIT_BIAS_ENTRIES_MAX = 1024  # as OpenAI
DEFAULT_MAX_TOKENS = 16  # as vLLM


class InvalidRequest(Exception):
    """A request that is wrong in itself; `parameter` names the culprit."""

    def __init__(self, parameter: str, why: str) -> None:
        """The text is what the client of the model sees."""
        super().__init__(f"invalid_request: {parameter}: {why}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. `seed` None means a fresh one a request."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # alternatives for each token of the prompt

    @property
    def greedy(self) -> bool:
        """Always the likeliest token."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the scores."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1.0


def parse_sampling_params(text: str, vocab_size: int) -> SamplingParams:
    """Parse and check the JSON of `sampling_parameters`; raises `InvalidRequest` naming the parameter."""
    try:
        raw = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("sampling_parameters", f"not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("sampling_parameters", "a JSON object is expected")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        check = _CHECKS.get(name)
        if check is None:
            raise InvalidRequest(name, "unknown sampling parameter")
        if value is not None:
            values[name] = check(name, value)
    values.pop("n", None)
    params = SamplingParams(**values)
    _check_against_vocabulary(params, vocab_size)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", f"{params.min_tokens} is more than max_tokens {params.max_tokens}")
    return params


def _check_against_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(name, f"token {token_id} is not in the vocabulary of {vocab_size} tokens")


Check = Callable[[str, Any], Any]


def _number(low: float, high: float, *, above: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(name, f"a finite number is expected, not {_shown(value)}")
        if not (low < value <= high if above else low <= value <= high):
            raise InvalidRequest(name, f"{value} is not in {'(' if above else '['}{low:g}, {high:g}]")
        return float(value)

    return check


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise InvalidRequest(name, f"a whole number is expected, not {_shown(value)}")
        if not low <= value <= high:
            raise InvalidRequest(name, f"{_shown(value)} is not in [{low}, {high}]")
        return int(value)

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"true or false is expected, not {_shown(value)}")
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(name, "a string or a list of strings is expected")
    if len(texts) > STOP_STRINGS_MAX:
        raise InvalidRequest(name, f"{len(texts)} strings are more than {STOP_STRINGS_MAX}")
    if not all(0 < len(text) <= STOP_STRING_CHARACTERS_MAX for text in texts):
        raise InvalidRequest(name, f"each string must have 1 to {STOP_STRING_CHARACTERS_MAX} characters")
    return tuple(texts)


def _token_ids(name: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise InvalidRequest(name, "a list of token ids is expected")
    return frozenset(value)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequest(name, "an object of token id to bias is expected")
    if len(value) > LOGIT_BIAS_ENTRIES_MAX:
        raise InvalidRequest(name, f"{len(value)} entries are more than {LOGIT_BIAS_ENTRIES_MAX}")
    bias: dict[int, float] = {}
    check = _number(-100.0, 100.0)
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(name, f"{_shown(key)} is not a token id")
        bias[int(key)] = check(name, amount)
    return bias


def _top_k(name: str, value: Any) -> int:
    """vLLM writes "all" as -1, others as 0."""
    return max(0, int(_integer(-1, 2**31 - 1)(name, value)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_CHECKS: dict[str, Check] = {
    "n": _integer(1, 1),
    "max_tokens": _integer(1, 2**31 - 1),
    "min_tokens": _integer(0, 2**31 - 1),
    "temperature": _number(0.0, 100.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "seed": _integer(-(2**63), 2**64 - 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 10.0, above=True),
    "logit_bias": _logit_bias,
    "logprobs": _integer(0, LOGPROBS_MAX),
    "prompt_logprobs": _integer(0, LOGPROBS_MAX),
}

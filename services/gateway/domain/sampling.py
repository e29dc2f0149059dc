"""How tokens are to be chosen, checked before anything is spent (invariant 15, case B41).

The engine checks again, in its own words; here the limits are those of the OpenAI API, and a wrong value names its
parameter. Nothing here knows HTTP. Source of the ranges: the OpenAI API reference (chat completions).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from roundhouse.errors import InvalidInput

STOP_STRINGS_MAX = 4  # OpenAI
STOP_CHARACTERS_MAX = 1024  # the reference engine holds text back up to this length
TOP_LOGPROBS_MAX = 20  # OpenAI
COMPLETION_LOGPROBS_MAX = 5  # OpenAI, completions
LOGIT_BIAS_ENTRIES_MAX = 1024  # OpenAI
CHOICES_MAX = 16  # a guess: `n` engine streams share one slot, so few
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1 - CHOICES_MAX  # choice i runs with seed + i, which must stay 64 bits


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling parameters of one request. None = the engine's default."""

    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # alternatives a token; 0 = only the chosen one
    prompt_logprobs: int | None = None  # the same for each token of the prompt

    def engine_parameters(self, choice: int, max_tokens: int, extra: Mapping[str, object] | None = None) -> str:
        """JSON for the engine's `sampling_parameters` of choice 0 … n-1; each choice has a seed of its own.

        `extra` is what we tell an engine that has no input for it; never a caller's."""
        values: dict[str, object] = {"max_tokens": max_tokens}
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None and value != ():
                values[name] = value
        if self.seed is not None:
            values["seed"] = self.seed + choice
        if self.logit_bias:
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        if extra:
            values["extra_args"] = {"roundhouse": extra}
        return json.dumps(values, separators=(",", ":"))


def with_adapter(parameters: str, engine_name: str) -> str:
    """`sampling_parameters` that name an adapter to vLLM's backend, which reads no input of ours; "" = none named."""
    if not engine_name:
        return parameters
    return json.dumps({**json.loads(parameters), "lora_name": engine_name}, separators=(",", ":"))


_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)

# name: (lowest, highest, whether the lowest itself is excluded)
_RANGES: Mapping[str, tuple[float, float, bool]] = {
    "n": (1, CHOICES_MAX, False),
    "max_tokens": (1, 2**31 - 1, False),
    "min_tokens": (0, 2**31 - 1, False),
    "temperature": (0, 2, False),
    "top_p": (0, 1, True),
    "top_k": (-1, 2**31 - 1, False),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, 10, True),
    "frequency_penalty": (-2, 2, False),
    "presence_penalty": (-2, 2, False),
    "seed": (SEED_MIN, SEED_MAX, False),
}


def check_ranges(values: Mapping[str, float | int | None]) -> None:
    """Check the numbers that have a range; raises InvalidInput with the first wrong one as `param`."""
    for name, value in values.items():
        if value is None or name not in _RANGES:
            continue
        low, high, open_low = _RANGES[name]
        if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
            edge = "(" if open_low else "["
            raise InvalidInput(f"'{name}' must be in {edge}{low:g}, {high:g}].", param=name)


def max_tokens_of(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """The output limit from its two names; raises InvalidInput when they disagree or are below 1."""
    if max_completion_tokens is not None and max_completion_tokens < 1:
        raise InvalidInput("'max_completion_tokens' must be at least 1.", param="max_completion_tokens")
    if max_tokens is not None and max_completion_tokens is not None and max_tokens != max_completion_tokens:
        raise InvalidInput(
            "'max_tokens' and 'max_completion_tokens' mean the same and differ.", param="max_completion_tokens"
        )
    return max_completion_tokens if max_completion_tokens is not None else max_tokens


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; raises InvalidInput when there are too many, or one is empty or too long."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > STOP_STRINGS_MAX:
        raise InvalidInput(f"'stop' takes at most {STOP_STRINGS_MAX} strings.", param="stop")
    if not all(0 < len(text) <= STOP_CHARACTERS_MAX for text in stops):
        raise InvalidInput(f"each 'stop' string must have 1 to {STOP_CHARACTERS_MAX} characters.", param="stop")
    return stops


def logit_bias_of(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Token id → bias pairs; raises InvalidInput for keys that are no ids and values outside -100 … 100."""
    if not bias:
        return ()
    if len(bias) > LOGIT_BIAS_ENTRIES_MAX:
        raise InvalidInput(f"'logit_bias' takes at most {LOGIT_BIAS_ENTRIES_MAX} entries.", param="logit_bias")
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):  # 10 digits hold any 32-bit id
            raise InvalidInput("'logit_bias' keys must be token ids.", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidInput("'logit_bias' values must be in [-100, 100].", param="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def check_vocabulary(sampling: Sampling, vocabulary_size: int) -> None:
    """Raise InvalidInput for token ids that the model does not have."""
    if any(token >= vocabulary_size for token, _ in sampling.logit_bias):
        raise InvalidInput(
            f"'logit_bias' names a token outside the vocabulary of {vocabulary_size}.", param="logit_bias"
        )
    if any(not 0 <= token < vocabulary_size for token in sampling.stop_token_ids):
        raise InvalidInput(
            f"'stop_token_ids' names a token outside the vocabulary of {vocabulary_size}.", param="stop_token_ids"
        )

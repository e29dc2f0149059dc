"""Chooses the next token of one sequence from its scores.

A request's choices depend on its own scores, parameters and seed only, so the same seed gives the same text in any
batch. Log probabilities are those of the model itself, before temperature, penalties and bias (as in vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.reference.sampling_params import SamplingParams

Scores = NDArray[np.float64]


class NumericFault(Exception):
    """The model gave no usable scores (NaN or infinite): its weights or an adapter are broken."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of the chosen token, and of the likeliest ones in falling order."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """The chance and the history of one request."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], eos: frozenset[int], vocab_size: int) -> None:
        """`eos` are forbidden until `min_tokens` are generated, and with them `stop_token_ids`."""
        self._params = params
        self._endings = sorted(eos | params.stop_token_ids)
        self._random = np.random.default_rng(None if params.seed is None else params.seed % 2**64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        self._generated = 0
        self._counts = np.zeros(vocab_size, np.int64) if params.penalised else None
        self._seen = np.zeros(vocab_size, bool) if params.penalised else None
        if self._seen is not None:
            self._seen[np.asarray(prompt, np.intp)] = True

    def choose(self, logits: NDArray[np.float32]) -> Choice:
        """Choose from `logits` `[vocab]`; raises `NumericFault`. Ties go to the lowest token id."""
        params = self._params
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise NumericFault("the model gave scores that are not finite")
        token_id = best if params.greedy and self._plain else self._choose_adjusted(logits)
        logprobs = None if params.logprobs is None else top_logprobs(logits, token_id, params.logprobs)
        self._note(token_id)
        return Choice(token_id, logprobs)

    def replay(self, token_id: int) -> None:
        """Take a token that a sampler with the same seed has chosen elsewhere; chance and history are then as there."""
        if not self._params.greedy:
            self._random.random()
        self._note(token_id)

    def _note(self, token_id: int) -> None:
        self._generated += 1
        if self._counts is not None and self._seen is not None:
            self._counts[token_id] += 1
            self._seen[token_id] = True

    @property
    def _plain(self) -> bool:
        """Whether the scores are used as they are."""
        early = self._generated < self._params.min_tokens and bool(self._endings)
        return not (early or len(self._bias) or self._params.penalised)

    def _choose_adjusted(self, logits: NDArray[np.float32]) -> int:
        scores = self._adjusted(logits.astype(np.float64))
        if self._params.greedy:
            return int(np.argmax(scores))
        return draw(scores / self._params.temperature, self._params, float(self._random.random()))

    def _adjusted(self, scores: Scores) -> Scores:
        params = self._params
        if self._counts is not None and self._seen is not None:
            worse = np.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
            scores = np.where(self._seen, worse, scores)
            scores -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        scores[self._bias_ids] += self._bias
        if self._generated < params.min_tokens:
            scores[self._endings] = -np.inf
        return scores


def draw(scores: Scores, params: SamplingParams, chance: float) -> int:
    """The token at `chance` in [0, 1) of what top_k, top_p and min_p leave of softmax(`scores`)."""
    order = np.argsort(-scores, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    reached = np.cumsum(weights)
    kept = len(order)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(reached, params.top_p * reached[-1])) + 1
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(weights >= params.min_p)))
    place = int(np.searchsorted(reached[:kept], chance * reached[kept - 1], side="right"))
    return int(order[min(place, kept - 1)])


def top_logprobs(logits: NDArray[np.float32], chosen: int, count: int) -> TokenLogprobs:
    """Natural log probabilities from `logits` `[vocab]`: of `chosen`, and of the `count` likeliest."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    logprobs = scores - np.log(np.exp(scores).sum())
    order = np.argsort(-logprobs, kind="stable")[:count]
    return TokenLogprobs(float(logprobs[chosen]), tuple((int(i), float(logprobs[i])) for i in order))

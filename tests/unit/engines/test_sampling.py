"""Sampling parameters are checked by name, and tokens are chosen as they say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.reference.sampler import NumericFault, Sampler, draw, top_logprobs
from engines.reference.sampling_params import InvalidRequest, SamplingParams, parse_sampling_params

VOCAB = 8
LOGITS = np.array([0.0, 1.0, 3.0, 2.0, -1.0, 3.0, 0.5, 0.0], np.float32)

BAD = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 2),
    ("top_p", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("n", 0),
    ("n", 2),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("seed", "x"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["a"] * 17),
    ("stop_token_ids", [99]),
    ("stop_token_ids", "1"),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"AI": -100}),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", {"5": "much"}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", []),
    ("logprobs", 21),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -3),
    ("repetition_penalty", 0),
    ("ignore_eos", 1),
    ("best_of", 2),
]


def parse(**params: Any) -> SamplingParams:
    """Parse against a vocabulary of 8 tokens."""
    return parse_sampling_params(json.dumps(params), VOCAB)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_parameter_is_refused_by_its_name(name: str, value: Any) -> None:
    """The error begins with its code and names the parameter (case B41)."""
    with pytest.raises(InvalidRequest) as refused:
        parse(**{name: value})
    assert refused.value.parameter == name
    assert str(refused.value).startswith(f"invalid_request: {name}: ")


@pytest.mark.parametrize("text", ["{", "[]", "5", "[" * 100_000, '{"temperature": NaN}', '{"temperature": Infinity}'])
def test_what_is_no_json_object_of_finite_numbers_is_refused(text: str) -> None:
    """Python's JSON reads NaN and Infinity; they must not get through."""
    with pytest.raises(InvalidRequest):
        parse_sampling_params(text, VOCAB)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    """4 tokens at least and 3 at most cannot be."""
    with pytest.raises(InvalidRequest) as refused:
        parse(min_tokens=4, max_tokens=3)
    assert refused.value.parameter == "min_tokens"


def test_defaults_are_those_of_vllm_and_null_means_default() -> None:
    """Temperature 1, 16 tokens; a null changes nothing."""
    assert parse() == parse(temperature=None, stop=None) == SamplingParams()
    assert SamplingParams().max_tokens == 16


def test_values_that_mean_the_same_are_read_the_same() -> None:
    """A single stop string is a list of one; top_k -1 and 0 mean all; 3.0 is 3."""
    assert parse(stop="a") == parse(stop=["a"])
    assert parse(top_k=-1) == parse(top_k=0)
    assert parse(max_tokens=3.0) == parse(max_tokens=3)


def choose(count: int = 1, logits: Any = LOGITS, prompt: tuple[int, ...] = (), **params: Any) -> list[int]:
    """`count` tokens in turn from the same logits; token 7 is the end token."""
    sampler = Sampler(parse(**params), prompt, frozenset({7}), VOCAB)
    return [sampler.choose(logits).token_id for _ in range(count)]


def test_greedy_takes_the_likeliest_and_ties_go_to_the_lowest_id() -> None:
    """Tokens 2 and 5 both score 3."""
    assert choose(temperature=0) == [2]


def test_logit_bias_moves_the_choice() -> None:
    """2 + 1.5 of token 3 beats 3; -100 bans tokens 2 and 5, which leaves token 3."""
    assert choose(temperature=0, logit_bias={"3": 1.5}) == [3]
    assert choose(temperature=0, logit_bias={"2": -100, "5": -100}) == [3]


def test_penalties_wear_a_token_down() -> None:
    """Frequency 0.7: token 2 falls to 2.3 after one use, 5 leads; then both are at 2.3 and 2 is first again."""
    assert choose(3, temperature=0, frequency_penalty=0.7) == [2, 5, 2]
    # Presence 2: 3 - 2 = 1 once used, whatever the count: 2, 5, then 3 (2.0), then token 1 ties the used ones at 1.
    assert choose(4, temperature=0, presence_penalty=2) == [2, 5, 3, 1]
    # Repetition 2 halves what was in the prompt: 2 is at 1.5, so 5 wins.
    assert choose(temperature=0, repetition_penalty=2, prompt=(2,)) == [5]


def test_end_tokens_are_forbidden_below_min_tokens() -> None:
    """The end token 7 is far ahead, but comes third."""
    logits = np.array([0, 0, 1, 0, 0, 0, 0, 50], np.float32)
    assert choose(3, logits, temperature=0, min_tokens=2) == [2, 2, 7]


@given(chance=st.floats(0, 1, exclude_max=True), top_k=st.integers(1, 8))
def test_top_k_leaves_the_k_likeliest(chance: float, top_k: int) -> None:
    """In order of score: 2, 5, 3, 1, 6, 0, 7, 4."""
    token = draw(LOGITS.astype(np.float64), SamplingParams(top_k=top_k), chance)
    assert token in [2, 5, 3, 1, 6, 0, 7, 4][:top_k]


def test_top_p_leaves_the_smallest_set_that_reaches_p() -> None:
    """Probabilities 0.5, 0.25, 0.15, 0.1: p = 0.6 needs the first two, p = 0.5 the first alone."""
    scores = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    assert {draw(scores, SamplingParams(top_p=0.6), c) for c in np.linspace(0, 0.999, 50)} == {1, 3}
    assert {draw(scores, SamplingParams(top_p=0.499), c) for c in np.linspace(0, 0.999, 50)} == {1}


def test_min_p_drops_what_is_far_below_the_likeliest() -> None:
    """0.4 of 0.5 is 0.2: 0.25 stays, 0.15 and 0.1 go."""
    scores = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    assert {draw(scores, SamplingParams(min_p=0.4), c) for c in np.linspace(0, 0.999, 50)} == {1, 3}


def test_draws_follow_the_probabilities() -> None:
    """At chances spread evenly over [0, 1) each token comes as often as it is likely: 50, 25, 15 and 10 of 100."""
    scores = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    drawn = [draw(scores, SamplingParams(), (i + 0.5) / 100) for i in range(100)]
    assert [drawn.count(token) for token in (1, 3, 2, 0)] == [50, 25, 15, 10]


def test_log_probabilities_are_the_model_s_own() -> None:
    """Before temperature and bias, in falling order, and their exponentials sum to 1."""
    sampler = Sampler(parse(temperature=0, logit_bias={"4": 100}, logprobs=3), (), frozenset(), VOCAB)
    choice = sampler.choose(LOGITS)
    assert choice.token_id == 4
    assert choice.logprobs is not None
    assert [token for token, _ in choice.logprobs.top] == [2, 5, 3]
    assert choice.logprobs.chosen == pytest.approx(choice.logprobs.top[0][1] - 4.0)  # scores -1 and 3
    assert sum(np.exp(p) for _, p in top_logprobs(LOGITS, 0, VOCAB).top) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_a_fault(bad: float) -> None:
    """Broken weights fail the request instead of emitting a made-up token."""
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(NumericFault):
        choose(logits=logits, temperature=0)

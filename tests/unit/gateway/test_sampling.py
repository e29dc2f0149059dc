"""Sampling parameters: what passes, what is refused, and what the engine is told."""

import json

import pytest

from roundhouse.errors import InvalidInput
from services.gateway.domain.sampling import (
    CHOICES_MAX,
    SEED_MAX,
    Sampling,
    check_ranges,
    check_vocabulary,
    logit_bias_of,
    max_tokens_of,
    stop_strings,
)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0, "top_p": 1.0, "n": 1},
        {"temperature": 2.0, "top_p": 0.01, "n": CHOICES_MAX},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "seed": -(2**63)},
        {"temperature": None, "n": None, "unknown": -5},
    ],
)
def test_values_at_the_edges_pass(values: dict[str, float]) -> None:
    """Both ends of a closed range belong to it; None is absent."""
    check_ranges(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("n", 0),
        ("n", CHOICES_MAX + 1),
        ("max_tokens", 0),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("seed", SEED_MAX + 1),
    ],
)
def test_values_outside_are_named(name: str, value: float) -> None:
    """Case B41: the wrong one is the `param`."""
    with pytest.raises(InvalidInput) as refused:
        check_ranges({"temperature": 1.0, name: value})
    assert refused.value.param == name


def test_each_choice_has_a_seed_of_its_own_and_none_overflows() -> None:
    """Choice 2 of seed 5 runs with 7; the largest seed with the largest choice is still 64 bits."""
    sampling = Sampling(seed=5, n=3, temperature=0.5, stop=("x",), logit_bias=((7, -1.0),))
    assert json.loads(sampling.engine_parameters(2, 10)) == {
        "max_tokens": 10,
        "temperature": 0.5,
        "stop": ["x"],
        "seed": 7,
        "logit_bias": {"7": -1.0},
    }
    last = json.loads(Sampling(seed=SEED_MAX).engine_parameters(CHOICES_MAX - 1, 1))
    assert last["seed"] < 2**63


def test_two_names_of_one_limit_must_agree() -> None:
    """Either alone, both alike, or a refusal."""
    assert max_tokens_of(5, None) == max_tokens_of(None, 5) == max_tokens_of(5, 5) == 5
    assert max_tokens_of(None, None) is None
    with pytest.raises(InvalidInput):
        max_tokens_of(5, 6)


def test_stop_strings_are_one_or_up_to_four() -> None:
    """A string is a list of one."""
    assert stop_strings(None) == ()
    assert stop_strings("a") == ("a",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for wrong in (["a"] * 5, [""], ["x" * 2000]):
        with pytest.raises(InvalidInput):
            stop_strings(wrong)


@pytest.mark.parametrize("bias", [{"AI": 1.0}, {"-1": 1.0}, {"5": 101.0}, {"99999999999": 1.0}, {"٣": 1.0}])
def test_a_bias_is_of_token_ids_and_bounded(bias: dict[str, float]) -> None:
    """Case B41."""
    with pytest.raises(InvalidInput) as refused:
        logit_bias_of(bias)
    assert refused.value.param == "logit_bias"


def test_tokens_must_be_in_the_vocabulary() -> None:
    """With 100 tokens 99 is the last."""
    check_vocabulary(Sampling(logit_bias=((99, 1.0),), stop_token_ids=(0,)), 100)
    for wrong in (Sampling(logit_bias=((100, 1.0),)), Sampling(stop_token_ids=(-1,))):
        with pytest.raises(InvalidInput):
            check_vocabulary(wrong, 100)

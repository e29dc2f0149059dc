"""A request that goes on elsewhere: the same tokens and characters as if it had stayed, wherever it was cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.reference.loaded_model import LoadedModel
from engines.reference.sampling_params import InvalidRequest
from tests.builders.checkpoints import random_checkpoint, scripted_checkpoint
from tests.unit.engines.engine_driver import Outcome, make_request, open_model, run_one, run_requests

ANSWER = "ď🌍你"  # two, four and three bytes, one byte a token
PROMPT = list(range(5, 45))

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "seed": 7},
    {"temperature": 0.8, "seed": -3, "top_p": 0.9, "top_k": 40},
    {"temperature": 1, "seed": 11, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1, "seed": 12, "min_tokens": 9},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One random model."""
    return open_model(random_checkpoint(tmp_path_factory.mktemp("random") / "m", 3))


def resumed(model: LoadedModel, prompt: Any, token_ids: list[int], **params: Any) -> Outcome:
    """What is generated after `token_ids`."""
    request = make_request(model, prompt, details={"phase": "decode", "resumed_token_ids": token_ids}, **params)
    return run_requests(model, [request])[0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_request_cut_anywhere_goes_on_as_if_it_had_stayed(model: LoadedModel, sampling: dict[str, Any]) -> None:
    """Twelve tokens, cut after each: the rest is token for token and character for character the rest of the whole."""
    whole = run_one(model, PROMPT, max_tokens=12, ignore_eos=True, **sampling)
    for cut in range(1, 12):
        rest = resumed(model, PROMPT, whole.token_ids[:cut], max_tokens=12, ignore_eos=True, **sampling)
        assert rest.token_ids == whole.token_ids[cut:]
        assert "".join(whole.pieces[:cut]) + rest.text == whole.text
        assert rest.finish == whole.finish


def test_a_cut_inside_a_character_neither_loses_nor_repeats_it(tmp_path: Path) -> None:
    """Case B31 across nodes: nine bytes, nine tokens; the characters come out once wherever the stream is cut."""
    model = open_model(scripted_checkpoint(tmp_path / "words", ANSWER))
    whole = run_one(model, "x", max_tokens=32)
    assert whole.text == ANSWER
    for cut in range(1, len(whole.token_ids)):
        rest = resumed(model, "x", whole.token_ids[:cut], max_tokens=32)
        assert "".join(whole.pieces[:cut]) + rest.text == ANSWER


def test_a_stop_string_over_the_cut_is_found(tmp_path: Path) -> None:
    """The text held back as a possible stop string is held back elsewhere too, and never sent."""
    model = open_model(scripted_checkpoint(tmp_path / "words", "abcdefgh"))
    whole = run_one(model, "x", max_tokens=32, stop=["cde"])
    assert whole.text == "ab"
    for cut in range(1, len(whole.token_ids)):
        rest = resumed(model, "x", whole.token_ids[:cut], max_tokens=32, stop=["cde"])
        assert ("".join(whole.pieces[:cut]) + rest.text, rest.finish) == ("ab", "stop")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_prefill_here_and_decode_there_give_the_text_of_one_place(model: LoadedModel, sampling: dict[str, Any]) -> None:
    """The prefill gives one token and says that another goes on; first token and rest are the whole."""
    whole = run_one(model, PROMPT, max_tokens=12, ignore_eos=True, **sampling)
    request = make_request(model, PROMPT, details={"phase": "prefill"}, max_tokens=12, ignore_eos=True, **sampling)
    first = run_requests(model, [request])[0]
    assert (first.token_ids, first.finish) == (whole.token_ids[:1], "handoff")
    rest = resumed(model, PROMPT, first.token_ids, max_tokens=12, ignore_eos=True, **sampling)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert first.text + rest.text == whole.text


def test_a_prefill_whose_first_token_is_the_last_ends_the_request(model: LoadedModel) -> None:
    """One token was asked for: the prefill's finish is the request's, and nobody goes on."""
    request = make_request(model, PROMPT, details={"phase": "prefill"}, max_tokens=1)
    assert run_requests(model, [request])[0].finish in ("length", "stop")


def test_a_prefill_takes_blocks_for_its_prompt_only(model: LoadedModel) -> None:
    """Its completion lives elsewhere: 40 tokens and one are three blocks of 16, whatever max_tokens is."""
    request = make_request(model, PROMPT, details={"phase": "prefill"}, max_tokens=900)
    assert request.tokens_max == 41


@pytest.mark.parametrize(
    ("details", "params"),
    [
        ({"resumed_token_ids": [5, 6]}, {"max_tokens": 2}),
        ({"resumed_token_ids": [10**6]}, {}),
        ({"resumed_token_ids": [-1]}, {}),
        ({"resumed_token_ids": "ab"}, {}),
        ({"resumed_token_ids": [5], "phase": "prefill"}, {}),
        ({"resumed_token_ids": [5], "phase": "embed"}, {}),
    ],
)
def test_what_cannot_be_resumed_is_refused(model: LoadedModel, details: dict[str, Any], params: dict[str, Any]) -> None:
    """Nothing left, no such token, no list, or nothing that generates: refused with the field's name."""
    with pytest.raises(InvalidRequest) as refused:
        make_request(model, PROMPT, details=details, **params)
    assert "resumed_token_ids" in str(refused.value)

"""Log probabilities of Triton's vLLM backend, as answers are made of."""

import json

from services.gateway.adapters.vllm_logprobs import in_our_form

A = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
B = {"logprob": -1.5, "rank": 2, "decoded_token": "\u00e4"}
RARE = {"logprob": float("-inf"), "rank": 9, "decoded_token": None}
OUR_A = {"id": 7, "token": "a", "bytes": [97], "logprob": -0.5}
OUR_B = {"id": 8, "token": "\u00e4", "bytes": [0xC3, 0xA4], "logprob": -1.5}
OUR_RARE = {"id": 9, "token": "", "bytes": [], "logprob": -9999.0}


def test_the_token_itself_and_the_likely_ones() -> None:
    """vLLM writes the token first, also when it is not among the most likely; none are wanted, or two."""
    told = json.dumps([{"7": A}, {"9": RARE, "8": B, "7": A}, {"8": B, "7": A}])
    bare = [{**each, "top": []} for each in (OUR_A, OUR_RARE, OUR_B)]
    assert json.loads(in_our_form(told, 0)) == bare
    assert json.loads(in_our_form(told, 2)) == [
        {**OUR_A, "top": [OUR_A]},
        {**OUR_RARE, "top": [OUR_A, OUR_B]},
        {**OUR_B, "top": [OUR_A, OUR_B]},
    ]


def test_what_is_in_our_form_stays() -> None:
    """Our engine's lists are not even read; one without a token says nothing."""
    ours = json.dumps([{**OUR_A, "top": []}])
    assert in_our_form(ours, 5) is ours
    assert in_our_form("[]", 5) == in_our_form("null", 5) == "[]"

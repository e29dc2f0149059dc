"""Log probabilities as Triton's vLLM backend writes them, in our engine's form, which all answers are made of.

    vLLM:  [{"17": {"logprob": -0.1, "rank": 1, "decoded_token": "a"}, "3": {...}}, ...]   the token itself first
    ours:  [{"id": 17, "token": "a", "bytes": [97], "logprob": -0.1, "top": [...]}, ...]

Source: `create_response` in triton-inference-server/vllm_backend, `src/utils/request.py`, and vLLM's `Logprob`. That
backend says a token's text and not its bytes: a part of a character comes as U+FFFD.
"""

import json
from collections.abc import Mapping
from typing import Any

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this for a token that is all but impossible


def in_our_form(text: str, wanted: int) -> str:
    """The list in our form, with the `wanted` most likely tokens of each place; a list that is in it stays as it is."""
    if text.startswith('[{"id"'):
        return text
    entries = json.loads(text) or []
    return json.dumps([_entry(entry, wanted) for entry in entries], separators=(",", ":"))


def _entry(entry: Mapping[str, Mapping[str, Any]], wanted: int) -> dict[str, Any]:
    (chosen, said), *_ = entry.items()
    likely = sorted(entry.items(), key=lambda each: each[1]["rank"] or len(entry))[:wanted]
    return {**_token(chosen, said), "top": [_token(token_id, each) for token_id, each in likely]}


def _token(token_id: str, said: Mapping[str, Any]) -> dict[str, Any]:
    text = said["decoded_token"] or ""
    logprob = max(float(said["logprob"]), LEAST)
    return {"id": int(token_id), "token": text, "bytes": list(text.encode()), "logprob": logprob}

"""The wire form of OpenAI answers: server-sent events made by filling a template, and whole answers as plain values.

A stream's events differ in a few places only, so the rest is encoded once per stream: this is the hot path (one event
a token). Source: the OpenAI API reference; order of events in docs/tenants/api.md.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event of a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """A server-sent comment, which clients ignore. `text` must be one line."""
    assert "\n" not in text, "a comment is one line"
    return b": " + text.encode() + b"\n\n"


class ChunkWriter:
    """Events of one chat or completion stream: same id, created and model on all."""

    def __init__(self, *, chat: bool, request_id: str, created_s: int, model: str, with_usage: bool) -> None:
        self._chat = chat
        head = {
            "id": answer_id(request_id, chat=chat),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created_s,
            "model": model,
        }
        self._head = b"data: " + _encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._open = self._head + b',"choices":[{"index":'

    def role(self, index: int) -> bytes:
        """First event of a chat choice."""
        return (
            self._open
            + b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
            + self._tail
        )

    def text(self, index: int, text: str, logprobs: Any = None) -> bytes:
        """More text of a choice."""
        body = b'%d,"delta":{"content":%b},"logprobs":' if self._chat else b'%d,"text":%b,"logprobs":'
        encoded = b"null" if logprobs is None else _encode(logprobs)
        return self._open + body % (index, _encode(text)) + encoded + b',"finish_reason":null}]' + self._tail

    def finish(self, index: int, reason: str) -> bytes:
        """Last event of a choice."""
        body = b'%d,"delta":{},"logprobs":null' if self._chat else b'%d,"text":"","logprobs":null'
        return self._open + body % index + b',"finish_reason":%b}]' % _encode(reason) + self._tail

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last event before [DONE] when usage was asked for (case B03)."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"


def answer_id(request_id: str, *, chat: bool) -> str:
    """The `id` of an answer."""
    return f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}"


def usage_of(input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_logprobs(text: str, _offset: int) -> dict[str, Any]:
    """Logprobs of a chat choice, from the engine's list of {id, token, bytes, logprob, top: […]}."""
    return {"content": [_chat_entry(entry, with_top=True) for entry in json.loads(text)], "refusal": None}


def _chat_entry(entry: Mapping[str, Any], *, with_top: bool = False) -> dict[str, Any]:
    shaped: dict[str, Any] = {name: entry[name] for name in ("token", "bytes", "logprob")}
    if with_top:
        shaped["top_logprobs"] = [_chat_entry(top) for top in entry["top"]]
    return shaped


def completion_logprobs(text: str, offset: int) -> dict[str, Any]:
    """Logprobs of a completion choice. `offset` is where the first token's text begins, in characters."""
    shaped: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in json.loads(text):
        shaped["tokens"].append(entry["token"])
        shaped["token_logprobs"].append(entry["logprob"])
        alternatives = {top["token"]: top["logprob"] for top in entry["top"]}
        shaped["top_logprobs"].append(None if entry["logprob"] is None else alternatives)
        shaped["text_offset"].append(offset)
        offset += len(entry["token"])
    return shaped


def echoed_logprobs(text: str, prompt: str) -> dict[str, Any]:
    """Logprobs of the prompt before its completion; its first token has none. A begin token is in no text."""
    shaped = completion_logprobs(text, 0)
    if shaped["tokens"] and not prompt.startswith(shaped["tokens"][0]):
        hidden = len(shaped["tokens"][0])
        shaped["text_offset"] = [max(0, offset - hidden) for offset in shaped["text_offset"]]
    return shaped


def joined_logprobs(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The logprobs of a whole answer from those of its pieces; None if there are none."""
    if not parts:
        return None
    joined: dict[str, Any] = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            if isinstance(value, list):
                joined[name] = joined[name] + value
    return joined

"""A small OpenAI client for the demo: streams a chat answer and says when its tokens came."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

REQUEST_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Answer:
    """What came of one request. Times in ms from the moment it was sent; 0 = it never came."""

    status: int = 0
    request_id: str = ""
    text: str = ""
    chunks: int = 0
    output_tokens: int = 0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    waited: list[str] = field(default_factory=list)  # what the server said while the request waited
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and not self.error


def open_client(http_url: str) -> httpx.AsyncClient:
    """A client without limits on connections: a loud tenant has many."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(base_url=http_url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)


async def ask(
    client: httpx.AsyncClient,
    key: str,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Stream one chat answer. Refusals and failures are in the answer, not raised. Cancelling closes the stream."""
    answer = Answer()
    started = time.perf_counter()
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": prompt}],
    }
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            answer.status = response.status_code
            answer.request_id = response.headers.get("x-request-id", "")
            if response.status_code != httpx.codes.OK:
                answer.error = _error_text(await response.aread())
            else:
                async for line in response.aiter_lines():
                    _take(line, answer, started, on_text)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_ms = _since_ms(started)
    return answer


def _take(line: str, answer: Answer, started: float, on_text: Callable[[str], None]) -> None:
    if line.startswith(":"):
        answer.waited.append(line.removeprefix(":").strip())
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        answer.error = str(event["error"].get("message"))
    if event.get("usage"):
        answer.output_tokens = int(event["usage"]["completion_tokens"])
    text = "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
    if text:
        answer.chunks += 1
        answer.first_token_ms = answer.first_token_ms or _since_ms(started)
        answer.text += text
        on_text(text)


def _since_ms(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _error_text(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error.get('code') or error.get('type')}: {error['message']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace")

"""Requests through a mesh whose parts are killed at chosen steps, and what their clients saw.

Clients count tokens from the text they received, byte by byte, not from what the mesh says of itself.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import httpx

WORKERS: Final = 8
TOKENS: Final = (4, 40)  # of a request; at 20 ms each a stream lasts up to 0.8 s
RETRY_S: Final = 0.3  # after a refusal, and while the gateway is away
AWAY_S_MAX: Final = 60.0
STEPS: Final = ("sent", "first token", "middle", "last token", "end", "recorded")
"""Where the marked request stands when a part is killed: some ms after it was sent (admitted, queued or granted), at
its first, middle and last token, some ms after its end (its event being published), and more (recorded, billed)."""


Kill = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Client:
    """One request as its client saw it."""

    number: int
    wanted: int  # tokens
    request_id: str = ""  # empty: no header came
    status: int = 0
    text: str = ""
    usage: int | None = None  # completion tokens that the answer told
    done: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in the text that came."""
        return self.text.count("tok")


@dataclass(slots=True)
class Mark:
    """A kill that waits for a request to reach a step. Done once."""

    step: str
    kill: Kill
    chance: random.Random
    task: "asyncio.Task[None] | None" = None

    def reached(self, step: str) -> None:
        """The request is at a step; kill if it is the one."""
        if step == self.step and self.task is None:
            self.task = asyncio.create_task(self._after(step))

    async def _after(self, step: str) -> None:
        pauses = {"sent": 0.02, "end": 0.03, "recorded": 0.3}
        await asyncio.sleep(self.chance.uniform(0, pauses.get(step, 0)))
        await self.kill()


@dataclass(slots=True)
class Load:
    """A block of requests, some of which are marked for a kill."""

    url: str
    key: str
    model: str
    chance: random.Random
    clients: list[Client] = field(default_factory=list)

    async def run(self, requests: int, marks: Sequence[Mark]) -> None:
        """Send `requests`, spread the marks over them evenly, and wait for all of both."""
        every = max(1, requests // max(1, len(marks)))
        marked = {every // 2 + place * every: mark for place, mark in enumerate(marks)}
        numbers = iter(range(requests))
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            await asyncio.gather(*(self._work(client, numbers, marked) for _ in range(WORKERS)))
        for mark in marks:
            assert mark.task is not None, f"no request reached {mark.step!r}"
            await mark.task

    async def _work(self, client: httpx.AsyncClient, numbers: Iterator[int], marked: dict[int, Mark]) -> None:
        for number in numbers:
            mark = marked.get(number)
            while not await self._one(client, number, mark):  # noqa: ASYNC110 - nothing to wait for but the next try
                await asyncio.sleep(RETRY_S)

    async def _one(self, client: httpx.AsyncClient, number: int, mark: Mark | None) -> bool:
        """One request; False if it is to be sent again: it was refused, or never got so far as its mark."""
        seen = Client(number, self.chance.randint(*TOKENS))
        await self._until_there(client)
        self.clients.append(seen)
        with suppress(httpx.HTTPError):  # the gateway was killed, or is not there yet
            await self._stream(client, seen, mark)
        return seen.status == 200 and (mark is None or mark.task is not None)

    async def _until_there(self, client: httpx.AsyncClient) -> None:
        async with asyncio.timeout(AWAY_S_MAX):
            while not await _ready(client):  # noqa: ASYNC110 - it is another process that gets ready
                await asyncio.sleep(RETRY_S)

    async def _stream(self, client: httpx.AsyncClient, seen: Client, mark: Mark | None) -> None:
        body = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": seen.wanted,
            "messages": [{"role": "user", "content": "hello"}],
        }
        headers = {"Authorization": f"Bearer {self.key}"}
        _reach(mark, "sent")
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            seen.status, seen.request_id = answer.status_code, answer.headers.get("x-request-id", "")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    seen.done = True
                elif line.startswith("data: {"):
                    self._take(seen, json.loads(line.removeprefix("data: ")), mark)
        if seen.done:
            _reach(mark, "end")
            _reach(mark, "recorded")

    def _take(self, seen: Client, event: dict[str, object], mark: Mark | None) -> None:
        choices: list[dict[str, dict[str, str]]] = event.get("choices") or []  # type: ignore[assignment]
        seen.text += "".join(choice.get("delta", {}).get("content") or "" for choice in choices)
        usage: dict[str, int] | None = event.get("usage")  # type: ignore[assignment]
        if usage:
            seen.usage = usage["completion_tokens"]
        if seen.tokens:
            _reach(mark, "first token")
        if seen.tokens >= seen.wanted // 2:
            _reach(mark, "middle")
        if seen.tokens >= seen.wanted:
            _reach(mark, "last token")


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).is_success
    except httpx.HTTPError:
        return False


def _reach(mark: Mark | None, step: str) -> None:
    if mark is not None:
        mark.reached(step)

"""Calls of the OpenAI API and what their answers hold."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from tests.integration.gateway.running_gateway import RunningGateway, until

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": MESSAGES}


async def post(gateway: RunningGateway, path: str, body: object, **headers: str) -> httpx.Response:
    """One request of tenant t1."""
    async with gateway.client(**headers) as client:
        return await client.post(path, json=body)


async def leave(gateway: RunningGateway, body: object, when: Callable[[], bool], **headers: str) -> None:
    """One request of tenant t1 whose connection is cut as soon as something is so."""
    call = asyncio.create_task(post(gateway, "/v1/chat/completions", body, **headers))
    await until(when)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


def data_of(text: str) -> list[str]:
    """The data of every event."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Every chunk of a stream that ended well."""
    *chunks, done = data_of(text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]

"""Calls of the OpenAI API and what their answers hold."""

import json
from typing import Any

import httpx

from tests.integration.gateway.running_gateway import RunningGateway

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": MESSAGES}


async def post(gateway: RunningGateway, path: str, body: object, **headers: str) -> httpx.Response:
    """One request of tenant t1."""
    async with gateway.client(**headers) as client:
        return await client.post(path, json=body)


def data_of(text: str) -> list[str]:
    """The data of every event."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Every chunk of a stream that ended well."""
    *chunks, done = data_of(text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]

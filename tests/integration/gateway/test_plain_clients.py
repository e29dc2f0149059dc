"""What people do without a library: curl; and tools, which a model's own template puts into its prompt."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.gateway.ports import EngineRequest
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, chunks_of
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

WEATHER = {"type": "function", "function": {"name": "weather_in", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


async def curl(gateway: RunningGateway, path: str, body: Any, *options: str) -> str:
    """What curl prints."""
    argv = ["curl", "-sS", "--max-time", "30", *options, f"{gateway.url}{path}"]
    argv += ["-H", f"Authorization: Bearer {KEYS['t1']}", "-H", "Content-Type: application/json"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, "-d", "@-", stdin=pipe, stdout=pipe)
    output, _ = await process.communicate(json.dumps(body).encode())
    assert process.returncode == 0
    return output.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_gets_whole_answers_streams_and_errors(gateway: RunningGateway) -> None:
    """A whole answer, a stream to its [DONE], a long body with `Expect: 100-continue`, a refusal with its status."""
    whole = json.loads(await curl(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 3}))
    assert whole["choices"][0]["message"]["content"] == "tok0 tok1 tok2 "
    streamed = await curl(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 3, "stream": True}, "-N")
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks_of(streamed))
    assert text == "tok0 tok1 tok2 "
    waits = ("-H", "Expect: 100-continue", "-w", "%{http_code}")
    padded = {**CHAT, "max_tokens": 1, "metadata": {"note": "x" * 200_000}}
    assert (await curl(gateway, "/v1/chat/completions", padded, *waits)).endswith("200")
    refused = await curl(gateway, "/v1/chat/completions", {**CHAT, "model": "absent"}, "-w", "%{http_code}")
    assert refused.endswith("404")


@pytest.mark.parametrize(
    ("choice", "prompt"),
    [({}, "[weather_in]hi"), ({"tool_choice": "auto"}, "[weather_in]hi"), ({"tool_choice": "none"}, "hi")],
)
async def test_tools_are_in_the_prompt_as_the_models_template_writes_them(
    nats_url: str, redis_url: str, tmp_path: Path, node: FakeNode, choice: dict[str, str], prompt: str
) -> None:
    """A template that names its tools gets them, unless the caller chooses none."""
    folder = random_checkpoint(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    model = llm_model(tokenizer_path=str(folder))
    async with running_gateway(nats_url, redis_url, catalogue(model), node=node) as gateway, gateway.client() as client:
        body = {**CHAT, "max_tokens": 1, "tools": [WEATHER], **choice}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [call] = node.calls
    assert isinstance(call, EngineRequest)
    assert call.text_input == prompt

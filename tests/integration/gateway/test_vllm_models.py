"""What a gateway tells an engine behind Triton's vLLM backend, which reads none of our inputs."""

import json
from pathlib import Path

from roundhouse.block_keys import tenant_salt
from roundhouse.catalogue.records import Engine
from services.gateway.ports import EngineRequest
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT
from tests.integration.gateway.running_gateway import running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model


async def test_the_salt_comes_from_the_key_whatever_the_body_says(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Invariants 11 and 16: two tenants' sampling parameters name two cache spaces, and an adapter's digest where there
    is one; a caller who sends `extra_args` changes nothing, and no seed is made up for an engine that cannot go on."""
    folder, node = random_checkpoint(tmp_path / "m"), FakeNode()
    models = (llm_model(engine=Engine.VLLM, tokenizer_path=str(folder)),)
    asked = {**CHAT, "extra_args": {"roundhouse": {"salt": "00"}}, "max_tokens": 2}
    async with running_gateway(nats_url, redis_url, catalogue(*models), node=node) as gateway:
        for tenant, model in (("t1", "m"), ("t2", "m"), ("t1", "tuned")):
            async with gateway.client(tenant) as client:
                answer = await client.post("/v1/chat/completions", json={**asked, "model": model})
            assert answer.status_code == 200
    told = [json.loads(call.sampling_parameters) for call in node.calls if isinstance(call, EngineRequest)]
    one, two = (tenant_salt("c", name).hex() for name in ("t1", "t2"))
    assert [each["extra_args"] for each in told] == [
        {"roundhouse": {"salt": one}},
        {"roundhouse": {"salt": two}},
        {"roundhouse": {"salt": one, "adapter_digest": "sha256:" + "cd" * 32}},
    ]
    assert all("seed" not in each for each in told)

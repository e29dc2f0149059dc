"""What a gateway tells an engine behind Triton's vLLM backend, which reads none of our inputs."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

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


async def test_a_prompt_counts_as_the_tokens_that_its_backend_makes(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Over a tokenizer that begins every text with `<s>`, a chat template without it, a text, and a list of ids without
    it: what queues and limits count, and blocks are named by, is what the engine makes of the text that it is sent."""
    folder, node = random_checkpoint(tmp_path / "m"), FakeNode()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    models = (llm_model(engine=Engine.VLLM, tokenizer_path=str(folder)),)
    async with (
        running_gateway(nats_url, redis_url, catalogue(*models), node=node) as gateway,
        gateway.client() as client,
    ):
        for route, more in (
            ("chat/completions", CHAT),
            ("completions", {"model": "m", "prompt": "hello"}),
            ("completions", {"model": "m", "prompt": [77, 78, 79]}),
        ):
            answer = await client.post(f"/v1/{route}", json={**more, "max_tokens": 1})
            assert answer.status_code == 200
    calls = [call for call in node.calls if isinstance(call, EngineRequest)]
    made = [tuple(tokenizer.encode(call.text_input, add_special_tokens=True).ids) for call in calls]
    assert [call.prompt_token_ids for call in calls] == made
    assert [submitted.input_tokens for submitted in gateway.scheduler.submitted] == [len(each) for each in made]


async def test_what_its_backend_cannot_be_told_is_refused(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """`logit_bias`, whose ids are texts in JSON and stay so on their way to vLLM: 400 before anything is asked."""
    folder, node = random_checkpoint(tmp_path / "m"), FakeNode()
    models = (llm_model(engine=Engine.VLLM, tokenizer_path=str(folder)),)
    async with (
        running_gateway(nats_url, redis_url, catalogue(*models), node=node) as gateway,
        gateway.client() as client,
    ):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "logit_bias": {"5": 1}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
    assert node.calls == []


async def test_an_engine_that_can_go_on_elsewhere_always_draws_by_a_seed(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Case B29: without a seed a stream could not be continued; so a request that names none gets one, its own for each
    request and choice, and one that names 7 keeps 7."""
    folder, node = random_checkpoint(tmp_path / "m"), FakeNode()
    async with (
        running_gateway(nats_url, redis_url, catalogue(llm_model(tokenizer_path=str(folder))), node=node) as gateway,
        gateway.client() as client,
    ):
        for more in ({"n": 2}, {}, {"seed": 7}):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1, "temperature": 1, **more})
            assert answer.status_code == 200
    calls = [call for call in node.calls if isinstance(call, EngineRequest)]
    seeds = [json.loads(call.sampling_parameters)["seed"] for call in calls]
    assert sorted(seeds[:2]) == [min(seeds[:2]), min(seeds[:2]) + 1]
    assert len(set(seeds)) == 4
    assert seeds[3] == 7
    assert all(call.return_token_ids for call in calls)

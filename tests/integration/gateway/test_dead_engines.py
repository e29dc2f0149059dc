"""A model process that dies on a living Triton: its streams are silent for ever unless somebody asks."""

import asyncio
from pathlib import Path

import pytest

from engines.packaging import EngineSpec
from roundhouse.vocabulary import RequestId
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.triton_node import TritonNodes
from services.gateway.ports import EngineRequest, InstanceBroken
from tests.builders.checkpoints import knob_model, random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer


def request_for(max_tokens: int) -> EngineRequest:
    """A small generation."""
    return EngineRequest(
        request_id=RequestId("r1"),
        text_input="hello",
        prompt_token_ids=(5, 6, 7),
        sampling_parameters=f'{{"max_tokens":{max_tokens}}}',
        phase="full",
        stream=True,
        salt="00" * 32,
        adapter_path="",
        adapter_digest="",
    )


async def read(nodes: TritonNodes, placement: Placement, max_tokens: int) -> int:
    """How many tokens a stream gives."""
    return sum(
        [chunk.output_tokens async for chunk in nodes.generate(placement, request_for(max_tokens), timeout_ms=60_000)]
    )


async def test_a_dead_engine_is_found_and_a_slow_one_is_left_alone(triton: TritonServer, tmp_path: Path) -> None:
    """Case B29: a stream whose engine died is told within 10 s, a later one at once; one that is silent for 5 s between
    tokens, with the same watch on it, gets all its tokens."""
    server = EngineServer(triton.grpc_address, triton.log)
    nodes = TritonNodes()
    places = {}
    for name, folder in (
        ("dies", knob_model(tmp_path / "dies", token_interval_ms=50, die_after_tokens=3)),
        ("slow", knob_model(tmp_path / "slow", token_interval_ms=5_000)),
    ):
        server.load(EngineSpec("triton", name, str(folder)))
        places[name] = Placement(node_id="n", triton_grpc_address=server.address, triton_model_name=name)
    checkpoint = random_checkpoint(tmp_path / "tiny")
    server.load(EngineSpec("reference", "tiny", str(checkpoint), kv_pool_tokens=256))
    slow = asyncio.create_task(read(nodes, places["slow"], 2))
    async with asyncio.timeout(60):
        with pytest.raises(InstanceBroken):
            await read(nodes, places["dies"], 20)
        with pytest.raises(InstanceBroken):
            await read(nodes, places["dies"], 20)
    assert await slow == 2
    await nodes.close()
    server.client.close()

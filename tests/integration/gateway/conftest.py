"""A gateway over real NATS and Valkey, with a scheduler and a node of the test's own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model, tensor_model


@pytest.fixture
def node() -> FakeNode:
    """The node behind every grant."""
    return FakeNode()


@pytest.fixture
async def gateway(nats_url: str, redis_url: str, tmp_path: Path, node: FakeNode) -> AsyncIterator[RunningGateway]:
    """A gateway with the model `m`, whose tokenizer has one token a byte, and the tensor model `scorer`."""
    folder = random_checkpoint(tmp_path / "m")
    models = (llm_model(tokenizer_path=str(folder)), tensor_model())
    async with running_gateway(nats_url, redis_url, catalogue(*models), node=node) as running:
        yield running

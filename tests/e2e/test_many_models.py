"""A hundred fine-tunes on nodes with room for eight each: the job this project is for.

All are asked in random order by ten tenants; every answer comes, the ledger of bytes is never over its capacity, and
the bill holds exactly the tokens that were streamed.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from deploy.local.parts import ClusterOptions
from roundhouse import subjects
from roundhouse.event_bus import Message, NatsBus
from roundhouse.wire.v1.loading_pb2 import NodeState
from roundhouse.wire.v1.vocabulary_pb2 import TIER_SOURCE
from tests.builders.checkpoints import random_checkpoint
from tests.e2e.mesh import Mesh, mesh_running

pytestmark = pytest.mark.timeout(300)

MODELS, TENANTS, ROOM = 100, 10, 8
MODEL_BYTES = 16 * 2**20
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two nodes with room for eight models each, a hundred models, ten tenants."""
    root = tmp_path_factory.mktemp("crowded")
    options = ClusterOptions(
        nodes=2,
        device_bytes=ROOM * MODEL_BYTES,
        arena_bytes=16 * 2**20,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        cluster="crowded",
        drain_seconds=3,
    )
    with mesh_running(root / "home", options, _catalogue(root)) as running:
        yield running


def _catalogue(root: Path) -> Path:
    models = [
        {
            "name": f"tune-{number:03}",
            "source": {"path": str(random_checkpoint(root / f"tune-{number:03}", number))},
            "engine": "reference",
            "interface": "llm",
            "memory": {"device": MODEL_BYTES, "kv_pool_tokens": 512},
            "price": {"id": "p", "output": "1"},
        }
        for number in range(MODELS)
    ]
    tenants = [{"name": f"tenant-{number}"} for number in range(TENANTS)]
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tenants": tenants, "models": models}))
    return path


class BytesWatch:
    """Every node state that is published, checked against invariant 6 as it comes."""

    def __init__(self) -> None:
        self.states = 0
        self.fullest = 0.0
        self.broken: list[str] = []

    async def on_state(self, message: Message) -> None:
        """Check one state."""
        state = NodeState.FromString(message.data)
        self.states += 1
        for tier in (tier for tier in state.tiers if tier.tier != TIER_SOURCE):  # which has no bound
            used = tier.resident + tier.reserved
            self.fullest = max(self.fullest, used / tier.capacity)
            if used > tier.capacity:
                self.broken.append(f"{state.node_id} {tier}")


async def test_a_hundred_models_in_random_order(crowded: Mesh) -> None:
    """Invariants 1, 6, 13: 100 of 100 answered, no byte over capacity in any published state, billed = streamed."""
    bus = await NatsBus.connect(crowded.nats_url, name="watch")
    watch = BytesWatch()
    await bus.subscribe(subjects.NODE_STATES, watch.on_state)
    order = list(range(MODELS))
    random.Random(7).shuffle(order)
    streamed: Counter[str] = Counter()
    calls = [
        _ask(crowded, f"tenant-{position % TENANTS}", f"tune-{number:03}", streamed)
        for position, number in enumerate(order)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    billed = await _billed(crowded, MODELS)
    await bus.close()
    assert watch.broken == []
    assert watch.states > ROOM  # a node that is busy tells several changes at once
    assert 0.9 < watch.fullest <= 1
    assert billed == dict(streamed)


async def _ask(mesh: Mesh, tenant: str, model: str, streamed: Counter[str]) -> None:
    """Stream one answer; count the tokens that the stream's own usage chunk names."""
    async with AsyncOpenAI(
        base_url=f"{mesh.http_url}/v1", api_key=mesh.keys[tenant], max_retries=0, timeout=180
    ) as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=HELLO,
            stream=True,
            max_tokens=12,
            stream_options={"include_usage": True},
            extra_headers={"x-request-deadline-ms": "170000"},
        )
        chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None
    assert any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
    streamed[tenant] += usage.completion_tokens


async def _billed(mesh: Mesh, requests: int) -> dict[str, int]:
    """Output tokens by tenant, once the ledger has all requests."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    async with httpx.AsyncClient(base_url=mesh.admin_url, headers=headers) as client, asyncio.timeout(20):
        while True:
            answer = await client.get("/admin/v1/usage", params={"group_by": "tenant"})
            rows = answer.json()["rows"]
            if sum(row["requests"] for row in rows) >= requests:
                return {row["tenant"]: row["output_tokens"] for row in rows}
            await asyncio.sleep(0.1)

"""Devices on the real mesh: gangs, slices of a tenant's own, and what can never fit, on a node with declared devices.

    device   0    1    2    3         one node; 40 MiB each, the slices 20 MiB
    group    0    0    1    2
    kind     –    –    MIG  MIG

`gang-*` take both devices of group 0 whole; `pair` a half of each; `one-*` 20 MiB of any; `own` is vip's, whose models
stand alone on a slice.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import APIStatusError, AsyncOpenAI

from deploy.local.overrides import Override
from deploy.local.parts import ClusterOptions
from roundhouse import subjects
from roundhouse.event_bus import Message, NatsBus
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from tests.builders.checkpoints import random_checkpoint
from tests.e2e.mesh import Mesh, mesh_running

pytestmark = pytest.mark.timeout(240)

MIB = 2**20
READY = vocabulary_pb2.INSTANCE_STATE_READY
SLICES = {2, 3}
DEVICES = [
    {"bytes": 40 * MIB, "link_group": 0},
    {"bytes": 40 * MIB, "link_group": 0},
    {"bytes": 20 * MIB, "link_group": 1, "mig": "1g.20mb"},
    {"bytes": 20 * MIB, "link_group": 2, "mig": "1g.20mb"},
]
ONES = [f"one-{number}" for number in range(5)]
OPTIONS = ClusterOptions(
    nodes=1,
    device_bytes=1,
    arena_bytes=16 * MIB,
    http_port=0,
    grpc_port=0,
    admin_port=0,
    cluster="devices",
    drain_seconds=3,
    overrides=(
        Override("loader", "DEVICES", json.dumps(DEVICES)),
        Override("loader", "DEVICE_BYTES", "0"),
        Override("scheduler", "ROTATION_SECONDS", "1"),
    ),
)
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The mesh with that node."""
    root = tmp_path_factory.mktemp("devices")
    with mesh_running(root / "home", OPTIONS, _catalogue(root)) as running:
        yield running


def _catalogue(root: Path) -> Path:
    sizes = {"gang-a": (80, 2), "gang-b": (80, 2), "pair": (40, 2), "wide": (60, 3), "own": (20, 1)}
    sizes |= dict.fromkeys(ONES, (20, 1))
    models = [
        {
            "name": name,
            "source": {"path": str(random_checkpoint(root / name, seed))},
            "engine": "reference",
            "interface": "llm",
            "memory": {"device": size * MIB, "kv_pool_tokens": 512},
            "tensor_parallel": count,
            "price": {"id": "p", "output": "1"},
        }
        for seed, (name, (size, count)) in enumerate(sizes.items())
    ]
    path = root / "catalogue.yaml"
    tenants = [{"name": "acme"}, {"name": "vip", "isolation": "dedicated-mig"}]
    path.write_text(yaml.safe_dump({"version": 1, "tenants": tenants, "models": models}))
    return path


class Watch:
    """Every state that the node publishes, checked as it comes."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self.broken: list[str] = []
        self.latest = loading_pb2.NodeState()

    async def on_state(self, message: Message) -> None:
        """Invariant 6 on each device; gangs whole and linked; nobody beside vip's model."""
        state = self.latest = loading_pb2.NodeState.FromString(message.data)
        on = {each.version.model: set(each.devices) for each in state.instances if each.devices}
        self.seen |= {(name, tuple(sorted(devices))) for name, devices in on.items()}
        self.broken += [f"{each}" for each in state.devices if each.resident + each.reserved > each.capacity]
        gangs = {name: devices for name, devices in on.items() if name.startswith(("gang", "pair"))}
        self.broken += [f"{name} on {devices}" for name, devices in gangs.items() if devices != {0, 1}]
        own = set(self.standing().get("own", ()))  # ready: before that, whoever stood there is leaving
        self.broken += [f"{name} on vip's slice" for name, devices in on.items() if name != "own" and devices & own]

    def standing(self) -> dict[str, tuple[int, ...]]:
        """What is ready now, and on which devices."""
        return {each.version.model: tuple(each.devices) for each in self.latest.instances if each.state == READY}


@asynccontextmanager
async def watched(mesh: Mesh) -> AsyncIterator[Watch]:
    """Watch the node; at the end nothing was wrong."""
    bus, watch = await NatsBus.connect(mesh.nats_url, name="watch"), Watch()
    await bus.subscribe(subjects.NODE_STATES, watch.on_state)
    try:
        yield watch
    finally:
        await bus.close()
    assert watch.broken == []


async def ask(mesh: Mesh, model: str, tenant: str = "acme") -> str:
    """One answer; its text."""
    client = AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key=mesh.keys[tenant], max_retries=0, timeout=120)
    async with client:
        headers = {"x-request-deadline-ms": "110000"}
        answer = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=8, extra_headers=headers)
    return answer.choices[0].message.content or ""


async def test_a_gang_stands_on_both_linked_devices_and_others_share_the_rest(divided: Mesh) -> None:
    """Scheduler point 6: `pair` has 20 MiB on devices 0 and 1, three small ones stand beside it, nobody leaves; a
    killed loader's next process finds all of them where they are."""
    async with watched(divided) as watch:
        await asyncio.gather(*(ask(divided, name) for name in ("pair", *ONES[:3])))
        standing = watch.standing()
        assert standing["pair"] == (0, 1)
        assert set(ONES[:3]) <= standing.keys()
        divided.crash("loader-1")
        async with asyncio.timeout(90):
            before = watch.latest.incarnation
            while watch.latest.incarnation == before or watch.standing() != standing:  # noqa: ASYNC110 - it is told
                await asyncio.sleep(0.1)
        await ask(divided, "pair")


async def test_gangs_and_singles_that_want_the_same_devices_all_run(divided: Mesh) -> None:
    """Two gangs that each need both devices, and five small ones that keep a half of one: no two hold half and wait for
    each other; every one is answered."""
    async with watched(divided) as watch:
        answers = await asyncio.gather(*(ask(divided, name) for name in ("gang-a", *ONES, "gang-b")))
        assert len(answers) == 7
        assert {("gang-a", (0, 1)), ("gang-b", (0, 1))} <= watch.seen


async def test_a_tenant_with_a_slice_of_its_own_is_alone_there(divided: Mesh) -> None:
    """Scheduler point 5: vip's model comes to a slice though two of the models that crowd the node stood there before,
    and while it stands there, none of them does."""
    async with watched(divided) as watch:
        crowd = [asyncio.create_task(ask(divided, name)) for _ in range(3) for name in ONES]
        await asyncio.gather(*(ask(divided, "own", "vip") for _ in range(4)))
        await asyncio.gather(*crowd)
        places = {devices for name, devices in watch.seen if name == "own"}
        assert places
        assert places <= {(index,) for index in SLICES}


async def test_a_model_of_everybodys_takes_turns_with_a_slice_of_ones_own(divided: Mesh) -> None:
    """The only node holds it once: it is unloaded and loaded anew, on a slice for vip, and back for all others."""
    async with watched(divided) as watch:
        for tenant in ("acme", "vip", "acme"):
            assert await ask(divided, "one-0", tenant)
            if tenant == "vip":
                assert set(watch.standing()["one-0"]) <= SLICES


async def test_a_gang_that_no_node_can_hold_is_refused_with_the_reason(divided: Mesh) -> None:
    """Three linked devices of 20 MiB: there are two."""
    async with watched(divided):
        with pytest.raises(APIStatusError) as refused:
            await ask(divided, "wide")
    assert "3 linked devices" in refused.value.message

"""A prompt goes where its beginning is cached, on the whole mesh: real kvstores announce, the scheduler follows."""

import asyncio
from typing import Any

import httpx

from roundhouse import subjects
from roundhouse.event_bus import Message, NatsBus
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from tests.e2e.catalogue import SHARED_PROMPT
from tests.e2e.mesh import Mesh

LONG = "the turntable brings every engine to its stall. " * 8  # 384 bytes, a token each: 24 blocks of 16
MODEL = "tiny-5"


class Asker:
    """Loads by hand and asks; knows from the usage events which node answered."""

    def __init__(self, mesh: Mesh, client: httpx.AsyncClient) -> None:
        self._mesh = mesh
        self._client = client
        self._nodes: dict[str, str] = {}

    async def on_usage(self, message: Message) -> bytes | None:
        """Note the node of a request."""
        event = UsageEvent.FromString(message.data)
        self._nodes[event.data.request_id] = event.data.node_id
        return None

    async def by_hand(self, what: str, node: str) -> None:
        """`load` or `unload` the model on a node."""
        await self._admin("POST", f"/models/{MODEL}/{what}", {"node": node})

    async def ready_nodes(self) -> set[str]:
        """Nodes on which the model is ready, by their own words."""
        nodes = (await self._admin("GET", "/nodes", None))["nodes"]
        return {
            node["node_id"]
            for node in nodes
            for each in node["instances"]
            if each["model"] == MODEL and each["state"] == "ready"
        }

    async def make_room(self, node: str) -> None:
        """Take everything else off a node: an operator's load evicts nothing by itself."""
        for found in (await self._admin("GET", "/nodes", None))["nodes"]:
            names = {each["model"] for each in found["instances"] if each["state"] == "ready"} - {MODEL}
            for name in sorted(names) if found["node_id"] == node else ():
                await self._admin("POST", f"/models/{name}/unload", {"node": node})

    async def until_ready_on(self, nodes: set[str]) -> None:
        """Wait for exactly these."""
        async with asyncio.timeout(60):
            while await self.ready_nodes() != nodes:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)  # for the next state that the scheduler hears

    async def ask(self, prompt: str, tenant: str = "acme") -> tuple[str, int]:
        """One completion; its node and how many of its tokens were cached."""
        headers = {"Authorization": f"Bearer {self._mesh.keys[tenant]}"}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        answer = await self._client.post(f"{self._mesh.http_url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        async with asyncio.timeout(30):
            while answer.headers["x-request-id"] not in self._nodes:  # noqa: ASYNC110 - it comes over the bus
                await asyncio.sleep(0.02)
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return self._nodes[answer.headers["x-request-id"]], cached

    async def _admin(self, method: str, path: str, body: object) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._mesh.admin_key}"}
        url = f"{self._mesh.admin_url}/admin/v1{path}"
        answer = await self._client.request(method, url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


async def test_a_prompt_follows_its_prefix(mesh: Mesh) -> None:
    """The model stands on node 2 alone and computes the prompt; then also on node 1, which goes first by name when
    nothing is known: another prompt goes there, the first one still goes to node 2 and finds its blocks."""
    bus = await NatsBus.connect(mesh.nats_url, name="test")
    try:
        async with httpx.AsyncClient(timeout=60) as client:
            asker = Asker(mesh, client)
            await bus.subscribe(subjects.usage("acme"), asker.on_usage)
            for node in await asker.ready_nodes() - {"node-2"}:
                await asker.by_hand("unload", node)
            await asker.make_room("node-2")
            await asker.by_hand("load", "node-2")
            await asker.until_ready_on({"node-2"})
            assert await asker.ask(LONG) == ("node-2", 0)
            await asker.make_room("node-1")
            await asker.by_hand("load", "node-1")
            await asker.until_ready_on({"node-1", "node-2"})
            found = [await asker.ask(LONG + f"and number {number}") for number in range(4)]
            assert {node for node, _ in found} == {"node-2"}
            assert all(cached >= len(LONG) // 16 * 16 for _, cached in found)
            assert (await asker.ask("a turntable is for all engines. " * 8))[0] == "node-1"
    finally:
        await bus.close()


async def test_a_group_shares_what_it_declared_and_nothing_else(mesh: Mesh) -> None:
    """East and west are in one group by both sides' word: west finds the 20 blocks of the declared beginning that east
    computed, and none of the same private words after it, which east finds again. South, whom the group does not list,
    and acme, who is in none, find nothing (invariants 11 and 16)."""
    private = " and what follows is a matter between a tenant and its own customers alone"
    prompt = SHARED_PROMPT + private
    shared, whole = len(SHARED_PROMPT) // 16 * 16, len(prompt) // 16 * 16
    bus = await NatsBus.connect(mesh.nats_url, name="test")
    try:
        async with httpx.AsyncClient(timeout=60) as client:
            asker = Asker(mesh, client)
            for tenant in ("east", "west", "south", "acme"):
                await bus.subscribe(subjects.usage(tenant), asker.on_usage)
            await asker.make_room("node-2")
            for node in await asker.ready_nodes() - {"node-2"}:
                await asker.by_hand("unload", node)
            await asker.by_hand("load", "node-2")
            await asker.until_ready_on({"node-2"})
            assert await asker.ask(prompt, "east") == ("node-2", 0)
            assert await asker.ask(prompt, "west") == ("node-2", shared)
            _, again = await asker.ask(prompt, "east")
            assert shared < again <= whole
            for stranger in ("south", "acme"):
                assert await asker.ask(prompt, stranger) == ("node-2", 0)
    finally:
        await bus.close()

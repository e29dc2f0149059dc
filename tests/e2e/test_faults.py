"""Faults of the whole mesh that no single service can show."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from tests.e2e.catalogue import write_catalogue
from tests.e2e.conftest import OPTIONS
from tests.e2e.mesh import Mesh, mesh_running

pytestmark = pytest.mark.timeout(240)

PIECE_TOKENS = 16  # of one piece at most, on a busy machine; one at a time on an idle one
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh of this module's own, whose bus may lose everything."""
    root = tmp_path_factory.mktemp("fragile")
    with mesh_running(root / "home", OPTIONS, write_catalogue(root)) as running:
        yield running


@asynccontextmanager
async def client_of(mesh: Mesh, tenant: str) -> AsyncIterator[AsyncOpenAI]:
    """The official client; it does not repeat what fails."""
    async with AsyncOpenAI(
        base_url=f"{mesh.http_url}/v1", api_key=mesh.keys[tenant], max_retries=0, timeout=60
    ) as client:
        yield client


async def usage_of(mesh: Mesh, tenant: str) -> dict[str, Any]:
    """The tenant's totals in the ledger."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    async with httpx.AsyncClient(base_url=mesh.admin_url, headers=headers) as client:
        answer = await client.get("/admin/v1/usage", params={"group_by": "tenant", "tenant": tenant})
        return next(iter(answer.json()["rows"]), {"requests": 0, "output_tokens": 0})


async def settled(mesh: Mesh, tenant: str, requests: int, within_s: float) -> dict[str, Any]:
    """The totals, once the ledger has that many requests."""
    async with asyncio.timeout(within_s):
        while (totals := await usage_of(mesh, tenant))["requests"] < requests:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.1)
    return totals


@pytest.mark.parametrize("store_kept", [True, False], ids=["same folder", "empty folder"])
async def test_the_bus_comes_back(fragile: Mesh, store_kept: bool) -> None:
    """Case B38: kill -9 of NATS, started again after 5 s, on its folder and on an empty one: readiness falls and comes
    back, ten requests are done and metered within 15 s, and no other part was restarted."""
    restarts = {name: count for name, count in fragile.restarts.items() if name != "nats"}
    before = await usage_of(fragile, "globex")
    async with client_of(fragile, "globex") as client:
        await client.chat.completions.create(model="tiny-1", messages=HELLO, max_tokens=4)
    before = await settled(fragile, "globex", before["requests"] + 1, 60)
    fragile.kill("nats")
    await asyncio.sleep(5)  # the case's own pause: time for every client library to notice and to back off
    assert fragile.why_not_ready("metering") is not None
    assert fragile.why_not_ready("gateway") is not None
    if not store_kept:
        shutil.rmtree(fragile.home.data / "nats")
    await asyncio.to_thread(fragile.restart, "nats")
    async with asyncio.timeout(60), client_of(fragile, "globex") as client:
        await asyncio.to_thread(fragile.wait_ready)
        calls = [client.chat.completions.create(model="tiny-1", messages=HELLO, max_tokens=4) for _ in range(10)]
        answers = await asyncio.gather(*calls)
        after = await settled(fragile, "globex", before["requests"] + 10, 60)
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    assert after["requests"] == before["requests"] + 10
    assert after["output_tokens"] == before["output_tokens"] + tokens
    assert {name: count for name, count in fragile.restarts.items() if name != "nats"} == restarts


@pytest.mark.parametrize("part", ["scheduler", "valkey", "nats"])
async def test_a_running_stream_outlives_the_control_plane(fragile: Mesh, part: str) -> None:
    """Invariant 18: the part is killed after the 5th of 150 tokens (3 s); all 150 come and are billed."""
    before = await usage_of(fragile, "acme")
    tokens = 0
    async with client_of(fragile, "acme") as client:
        stream = await client.chat.completions.create(
            model="story", messages=HELLO, max_tokens=150, stream=True, stream_options={"include_usage": True}
        )
        usage = None
        async for chunk in stream:
            tokens += bool(chunk.choices and chunk.choices[0].delta.content)
            if tokens == 5 and fragile.why_not_ready(part) is None:
                fragile.kill(part)
            usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == 150
    await asyncio.to_thread(fragile.restart, part)
    await asyncio.to_thread(fragile.wait_ready)
    after = await settled(fragile, "acme", before["requests"] + 1, 20)
    assert after["output_tokens"] == before["output_tokens"] + 150


@pytest.mark.parametrize("outbox", ["kept", "late", "lost"])
async def test_what_a_killed_gateway_had_streamed_is_billed_once(fragile: Mesh, outbox: str) -> None:
    """Invariants 1, 13 and 14: kill -9 of the gateway mid-stream. Its successor bills what was streamed, exactly but
    for the piece that was being sent; if it comes after the lease has ended, in place of the scheduler's bill from the
    last heartbeat; if its disk is lost, that bill stays. The slots serve the next requests."""
    before = await usage_of(fragile, "acme")
    seen: list[str] = []
    with pytest.raises((APIError, httpx.HTTPError)):
        await _read_until_killed(fragile, "acme", seen, kill_at=120)
    if outbox == "late":
        await _until_settled_by_the_scheduler(fragile, before["requests"] + 1)
    if outbox == "lost":
        shutil.rmtree(fragile.home.data / "outbox")
    await asyncio.to_thread(fragile.restart, "gateway")
    after = await settled(fragile, "acme", before["requests"] + 1, 30)
    received = "".join(seen).count("tok")
    if outbox == "lost":
        billed = after["output_tokens"] - before["output_tokens"]
        assert 50 < billed <= 180  # 120 were read; a heartbeat, once a second, is up to 50 tokens off either way
    else:
        await _billed(fragile, before["output_tokens"], received, received + PIECE_TOKENS)
    async with client_of(fragile, "acme") as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="story", messages=HELLO, max_tokens=2) for _ in range(4))
        )
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [2] * 4
    final = await settled(fragile, "acme", before["requests"] + 5, 20)
    assert final["requests"] == before["requests"] + 5


async def _read_until_killed(mesh: Mesh, tenant: str, seen: list[str], *, kill_at: int) -> None:
    """Streams a story and kills the gateway at its `kill_at`th token; raises what the client then sees."""
    async with client_of(mesh, tenant) as client:
        stream = await client.chat.completions.create(model="story", messages=HELLO, max_tokens=1000, stream=True)
        killed = False
        async for chunk in stream:
            seen += [chunk.choices[0].delta.content or ""] if chunk.choices else []
            if not killed and "".join(seen).count("tok") >= kill_at:
                killed = True
                mesh.kill("gateway")


async def _until_settled_by_the_scheduler(mesh: Mesh, requests: int) -> None:
    """The gateway is down, so metering itself is asked."""
    port = next(part.program.port for part in mesh._cluster.plan.parts if part.name == "metering")
    async with asyncio.timeout(40), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1") as client:
        rows: list[Any] = []
        while not rows or rows[0]["requests"] < requests:
            rows = (await client.get("/usage", params={"group_by": "tenant", "tenant": "acme"})).json()["rows"]
            await asyncio.sleep(0.1)


async def _billed(mesh: Mesh, before: int, least: int, most: int) -> None:
    """Wait until the tokens billed since `before` are within the bounds."""
    billed = -1
    for _ in range(300):
        billed = (await usage_of(mesh, "acme"))["output_tokens"] - before
        if least <= billed <= most:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{billed} tokens were billed, {least} received")

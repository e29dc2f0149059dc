"""The native gRPC API, batches and idempotency keys on the whole mesh: real queues, real engines, the ledger's rows."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI

from roundhouse.wire.v1 import inference_pb2 as wire
from roundhouse.wire.v1 import inference_pb2_grpc, metering_pb2, metering_pb2_grpc
from tests.e2e.calls import ledger_rows
from tests.e2e.catalogue import ANSWER
from tests.e2e.mesh import Mesh

HELLO = wire.Chat(messages=[wire.ChatMessage(role="user", content="hello")])


@pytest.fixture
async def stub(mesh: Mesh) -> AsyncIterator[Any]:
    """The service as a tenant's program sees it."""
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def key(mesh: Mesh, tenant: str = "acme") -> tuple[tuple[str, str], ...]:
    """A tenant's key as metadata."""
    return (("authorization", f"Bearer {mesh.keys[tenant]}"),)


async def test_a_generation_is_whole_characters_and_one_row_in_the_ledger(mesh: Mesh, stub: Any) -> None:
    """Case B31 and invariant 13: the script's text, no piece cut inside a character, tokens equal to the bill."""
    call = stub.Generate(wire.GenerateRequest(model="words", chat=HELLO), metadata=key(mesh), timeout=60)
    messages = [message async for message in call]
    pieces = [message.piece.text for message in messages if message.WhichOneof("event") == "piece"]
    assert "".join(pieces) == ANSWER
    assert all(piece in ANSWER for piece in pieces)
    ended = messages[-1].ended
    rows = await asyncio.to_thread(ledger_rows, mesh, "acme", {ended.request_id})
    row = rows[ended.request_id]
    assert (int(row["input_tokens"]), int(row["output_tokens"])) == (
        ended.usage.input_tokens,
        ended.usage.output_tokens,
    )


async def test_a_cancelled_generation_pays_what_came(mesh: Mesh, stub: Any) -> None:
    """Case B35: of 200 tokens 20 ms apart a few are read; the row says cancelled and far fewer than 200."""
    request = wire.GenerateRequest(model="story", chat=HELLO, sampling=wire.SamplingOptions(max_tokens=200))
    call = stub.Generate(request, metadata=key(mesh), timeout=60)
    request_id, seen = "", 0
    async for message in call:
        seen += message.WhichOneof("event") == "piece"
        if seen == 3:
            request_id = dict(await call.initial_metadata())["x-request-id"]
            break
    call.cancel()
    rows = await asyncio.to_thread(ledger_rows, mesh, "acme", {request_id})
    assert 3 <= int(rows[request_id]["output_tokens"]) < 100


async def test_lists_and_errors_are_the_tenants(mesh: Mesh, stub: Any) -> None:
    """What another tenant owns is not listed and not found."""
    mine = {card.name for card in (await stub.ListModels(wire.ListModelsRequest(), metadata=key(mesh))).models}
    theirs = await stub.ListModels(wire.ListModelsRequest(), metadata=key(mesh, "globex"))
    assert "acme-only" in mine
    assert "acme-only" not in {card.name for card in theirs.models}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(
            aiter(stub.Generate(wire.GenerateRequest(model="acme-only", chat=HELLO), metadata=key(mesh, "globex")))
        )
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_batch_runs_on_the_mesh(mesh: Mesh) -> None:
    """Twelve lines over three models, cold ones too: every line once, and every answered line in the ledger."""
    lines: list[dict[str, Any]] = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": f"tiny-{number % 3 + 1}",
                "max_tokens": 3,
                "messages": [{"role": "user", "content": "hello"}],
            },
        }
        for number in range(12)
    ]
    async with AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key=mesh.keys["acme"], max_retries=0) as client:
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        async with asyncio.timeout(100):
            while batch.status not in ("completed", "failed"):
                await asyncio.sleep(0.2)
                batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None, batch
        output = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert sorted(one["custom_id"] for one in output) == sorted(line["custom_id"] for line in lines)
    await asyncio.to_thread(ledger_rows, mesh, "acme", {one["response"]["request_id"] for one in output})


async def test_an_idempotent_request_is_one_row(mesh: Mesh) -> None:
    """Three times the same key and body: the same bytes, and only the first request is in the ledger."""
    headers = {"authorization": f"Bearer {mesh.keys['acme']}", "idempotency-key": uuid.uuid4().hex}
    body = {"model": "tiny-1", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(base_url=mesh.http_url, headers=headers, timeout=60) as client:
        answers = [await client.post("/v1/chat/completions", json=body) for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1
    first = answers[0].headers["x-request-id"]
    assert [answer.headers.get("x-original-request-id") for answer in answers] == [None, first, first]
    await asyncio.to_thread(ledger_rows, mesh, "acme", {first})


async def test_a_tenant_reads_its_bill_over_grpc(mesh: Mesh, stub: Any) -> None:
    """What one generation used is on the tenant's own bill over gRPC; another tenant's bill is refused."""
    call = stub.Generate(wire.GenerateRequest(model="words", chat=HELLO), metadata=key(mesh, "globex"), timeout=60)
    ended = [message async for message in call][-1].ended
    await asyncio.to_thread(ledger_rows, mesh, "globex", {ended.request_id})
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        bill = metering_pb2_grpc.MeteringStub(channel)
        records = await bill.ListRecords(metering_pb2.ListRecordsRequest(), metadata=key(mesh, "globex"), timeout=30)
        found = {record.event.data.request_id: record for record in records.records}
        assert found[ended.request_id].event.data.output_tokens == ended.usage.output_tokens
        assert {record.event.subject for record in records.records} == {"globex"}
        asked = metering_pb2.QueryUsageRequest(filter=metering_pb2.UsageFilter(tenant="acme"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bill.QueryUsage(asked, metadata=key(mesh, "globex"), timeout=30)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

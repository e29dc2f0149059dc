"""/v1/files and /v1/batches with the official client, over real NATS and Valkey and a node of the test's own."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from roundhouse.errors import EngineFailed
from roundhouse.event_bus import NatsBus
from roundhouse.vocabulary import KeyId, TenantId
from roundhouse.wire.v1 import vocabulary_pb2
from services.gateway.adapters import jetstream_batches
from services.gateway.adapters.jetstream_batches import JetStreamBatches
from services.gateway.domain.batches import Batch, LineResult, Submitter
from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

ENDED = {"completed", "failed", "expired", "cancelled"}


def openai_client(gateway: RunningGateway, tenant: str = "t1") -> AsyncOpenAI:
    """The official client with a tenant's key."""
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS[tenant], timeout=30, max_retries=0)


def line(number: int, **changes: Any) -> dict[str, Any]:
    """One line of an input file: a chat with 2 tokens."""
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], **changes.pop("body", {})}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}


def jsonl(lines: list[Any]) -> bytes:
    """The lines as a file."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def started(client: AsyncOpenAI, content: bytes, *, endpoint: Any = "/v1/chat/completions") -> Any:
    """A batch over this input."""
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"name": "night"}
    )


async def ended(client: AsyncOpenAI, batch_id: str, *, within_s: float = 60) -> Any:
    """The batch once nothing more will happen to it."""
    async with asyncio.timeout(within_s):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:  # noqa: ASYNC110 - polled by all
            await asyncio.sleep(0.05)
    return batch


async def completed(client: AsyncOpenAI, batch_id: str) -> int:
    """How many lines were answered so far."""
    counts = (await client.batches.retrieve(batch_id)).request_counts
    assert counts is not None
    return counts.completed


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file."""
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(one) for one in text.splitlines()]


async def test_a_batch_answers_every_line_once_and_is_billed_in_its_class(gateway: RunningGateway) -> None:
    """20 lines, of which 2 are wrong in their body: 18 answers, 2 errors, and 18 events of the batch class."""
    lines = [line(number) for number in range(20)]
    lines[3] = line(3, body={"temperature": 9})
    lines[7] = line(7, body={"model": "absent"})
    async with openai_client(gateway) as client:
        made = await started(client, jsonl(lines))
        assert made.status in ("validating", "in_progress", "finalizing", "completed")
        batch = await ended(client, made.id)
        assert (batch.status, batch.request_counts.total) == ("completed", 20)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (18, 2)
        assert batch.metadata == {"name": "night"}
        assert batch.completed_at >= batch.in_progress_at >= batch.created_at
        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert Counter(one["custom_id"] for one in [*output, *errors]) == Counter(f"c{number}" for number in range(20))
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] == "tok0 tok1 " for one in output)
    wrong = {one["custom_id"]: one["response"] for one in errors}
    assert (wrong["c3"]["status_code"], wrong["c3"]["body"]["error"]["param"]) == (400, "temperature")
    assert (wrong["c7"]["status_code"], wrong["c7"]["body"]["error"]["code"]) == (404, "model_not_found")
    events = await gateway.usage(18)
    assert {event.data.priority_class for event in events} == {vocabulary_pb2.PRIORITY_CLASS_BATCH}
    assert {event.data.request_id for event in events} == {one["response"]["request_id"] for one in output}
    assert {request.priority_class for request in gateway.scheduler.submitted} == {vocabulary_pb2.PRIORITY_CLASS_BATCH}


@pytest.mark.parametrize(
    ("endpoint", "body", "shape"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hi"}, "text_completion"),
        ("/v1/embeddings", {"model": "m", "input": "hi"}, "list"),
    ],
)
async def test_the_other_endpoints_too(gateway: RunningGateway, endpoint: str, body: Any, shape: str) -> None:
    """What answers over HTTP answers in a batch."""
    one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    async with openai_client(gateway) as client:
        batch = await ended(client, (await started(client, jsonl([one]), endpoint=endpoint)).id)
        [answer] = await lines_of(client, batch.output_file_id)
    assert answer["response"]["body"]["object"] == shape


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"{\n", "invalid_json_line"),
        (b"\xff\xfe\n", "invalid_json_line"),
        (b"[]\n", "invalid_request"),
        (jsonl([{**line(1), "custom_id": 5}]), "invalid_custom_id"),
        (jsonl([line(1), line(1)]), "duplicate_custom_id"),
        (jsonl([line(1, url="/v1/embeddings")]), "invalid_url"),
        (jsonl([line(1, method="GET")]), "invalid_method"),
    ],
)
async def test_a_file_that_is_no_batch_fails_whole(gateway: RunningGateway, content: bytes, code: str) -> None:
    """Invariant 15: nothing runs, and the problem is told with its line."""
    async with openai_client(gateway) as client:
        batch = await ended(client, (await started(client, content)).id)
    assert batch.status == "failed"
    assert batch.errors.data[0].code == code
    assert gateway.scheduler.submitted == []


async def test_a_cancelled_batch_keeps_what_has_run(gateway: RunningGateway, node: FakeNode) -> None:
    """Of 100 slow lines some have run: they are in the output, the rest in the error file, each once."""
    node.interval_ms = 50
    async with openai_client(gateway) as client:
        made = await started(client, jsonl([line(number, body={"max_tokens": 20}) for number in range(100)]))
        async with asyncio.timeout(60):
            while await completed(client, made.id) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        cancelled = await client.batches.cancel(made.id)
        assert cancelled.status in ("cancelling", "cancelled")
        batch = await ended(client, made.id)
        assert (await client.batches.cancel(made.id)).status == "cancelled"
        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert batch.status == "cancelled"
    assert len(output) == batch.request_counts.completed > 0
    assert Counter(one["custom_id"] for one in [*output, *errors]) == Counter(f"c{number}" for number in range(100))
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert node.open_streams == 0


async def test_a_batch_that_does_not_finish_in_time_expires_with_partial_results(
    gateway: RunningGateway, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 2 s: some lines ran, the others say `batch_expired`."""
    monkeypatch.setattr("services.gateway.operations.batches.WINDOW_S", 2)
    node.interval_ms = 100
    async with openai_client(gateway) as client:
        batch = await ended(client, (await started(client, jsonl([line(number) for number in range(200)]))).id)
        errors = await lines_of(client, batch.error_file_id)
        output = await lines_of(client, batch.output_file_id)
    assert batch.status == "expired"
    assert len(output) + len(errors) == 200
    assert output
    assert errors[-1]["error"]["code"] == "batch_expired"


async def test_a_line_waits_for_what_waiting_cures(gateway: RunningGateway, node: FakeNode) -> None:
    """An engine that fails once more than a request's own attempts, then works: the line is answered, not failed."""
    node.fail_after, node.failures_left, node.failure = (
        0,
        4,
        EngineFailed("The engine failed while it ran the request."),
    )
    async with openai_client(gateway) as client:
        batch = await ended(client, (await started(client, jsonl([line(1)]))).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


async def test_tenants_do_not_see_each_others_files_and_batches(gateway: RunningGateway) -> None:
    """Invariant 16: another tenant's ids are not found, in any call, and lists are one's own."""
    async with openai_client(gateway) as mine, openai_client(gateway, "t2") as other:
        batch = await ended(mine, (await started(mine, jsonl([line(1)]))).id)
        for call in (
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id),
            other.files.delete(batch.output_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [one.id async for one in other.batches.list()] == []
        assert [one.id async for one in other.files.list()] == []
        assert [one.id async for one in mine.batches.list()] == [batch.id]


async def test_files_are_kept_listed_and_removed(gateway: RunningGateway) -> None:
    """Byte for byte; newest first; pages follow each other; a batch's input cannot go while it is read."""
    content = b"\x00\xff\r\n" * 50_000
    async with openai_client(gateway) as client:
        first = await client.files.create(file=("ä.bin", content), purpose="batch")
        assert (first.bytes, first.filename, first.purpose) == (200_000, "ä.bin", "batch")
        assert (await client.files.content(first.id)).content == content
        others = [await client.files.create(file=b"x", purpose="batch") for _ in range(4)]
        ids = {first.id, *(other.id for other in others)}
        assert {file.id async for file in client.files.list(limit=2)} == ids  # five files in three pages
        assert (await client.files.delete(first.id)).deleted
        for call in (client.files.retrieve(first.id), client.files.content(first.id), client.files.delete(first.id)):
            with pytest.raises(openai.NotFoundError):
                await call


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after"),
    ],
)
async def test_a_wrong_upload_is_refused(gateway: RunningGateway, wish: dict[str, Any], param: str) -> None:
    """400 with its `param`."""
    async with openai_client(gateway) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(**{"file": b"x", "purpose": "batch", **wish})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"--b\r\nnonsense"),
        ("multipart/form-data", b"x"),
        ("application/json", b"{}"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nnot a file\r\n--b--\r\n',
        ),
    ],
)
async def test_a_body_that_is_no_form_is_refused(gateway: RunningGateway, content_type: str, body: bytes) -> None:
    """Whatever is sent, the answer is about the caller's input."""
    async with gateway.client(**{"content-type": content_type}) as client:
        answer = await client.post("/v1/files", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_room_is_bounded(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """A file of more than 4 kB is 413; files of more than 6 kB together are 400, and the last one is not kept."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
    bounds: dict[str, Any] = {"file_bytes_max": 4096, "tenant_file_bytes_max": 6000}
    async with (
        running_gateway(nats_url, redis_url, catalogue(model), node=FakeNode(), **bounds) as gateway,
        openai_client(gateway) as client,
    ):
        with pytest.raises(openai.APIStatusError) as long:
            await client.files.create(file=b"x" * 5000, purpose="batch")
        assert long.value.status_code == 413
        await client.files.create(file=b"x" * 4000, purpose="batch")
        with pytest.raises(openai.BadRequestError) as full:
            await client.files.create(file=b"x" * 3000, purpose="batch")
        assert full.value.code == "file_quota_exceeded"
        assert len([file async for file in client.files.list()]) == 1


async def test_a_result_is_taken_once(nats_url: str) -> None:
    """The stream itself refuses a second result of a line, whoever brings it."""
    bus = await NatsBus.connect(nats_url, name="test")
    stores = await JetStreamBatches.open(bus)
    batch = Batch("batch_1", TenantId("acme.x>"), Submitter(KeyId("k"), ""), "/v1/embeddings", "file-1", 0, 0)
    first = LineResult(1, "a", status=200, body={"x": 1})
    assert await stores.results.add(batch, first)
    assert not await stores.results.add(batch, LineResult(1, "a", status=500))
    assert [result async for result in stores.results.all(batch)] == [first]
    await stores.results.forget(batch.tenant_id, batch.batch_id)
    assert [result async for result in stores.results.all(batch)] == []
    await bus.close()


Spawn = Callable[[str], Any]


@pytest.fixture
async def spawn(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Spawn]:
    """Starts gateways in processes of their own."""
    checkpoint = random_checkpoint(tmp_path / "m")
    running: list[asyncio.subprocess.Process] = []

    async def start(name: str) -> asyncio.subprocess.Process:
        program = [sys.executable, "-m", "tests.integration.gateway.doomed_gateway", nats_url, redis_url]
        process = await asyncio.create_subprocess_exec(
            *program, str(checkpoint), name, "100", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        running.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while (said := await process.stdout.readline()) != b"ready\n":
                assert said, "the gateway ended before it was ready"
        return process

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_another_gateway_goes_on_after_a_kill(
    nats_url: str, redis_url: str, tmp_path: Path, spawn: Spawn
) -> None:
    """A gateway is killed with SIGKILL in the middle of a batch of 60 lines: another one ends it, and every line has
    exactly one result; lines that had a result before are not run again."""
    model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "idle")))
    async with (
        running_gateway(nats_url, redis_url, catalogue(model), node=FakeNode(), batch_workers=0) as gateway,
        openai_client(gateway) as client,
    ):
        await set_ack_wait(gateway, 6.0)  # else the queue waits 15 s for a gateway that is silent
        doomed = await spawn("doomed")
        made = await started(client, jsonl([line(number, body={"max_tokens": 5}) for number in range(60)]))
        async with asyncio.timeout(60):
            while await completed(client, made.id) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        doomed.kill()
        await doomed.wait()
        assert await completed(client, made.id) < 60
        await spawn("heir")
        batch = await ended(client, made.id, within_s=90)
        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert (batch.status, errors) == ("completed", [])
    assert Counter(one["custom_id"] for one in output) == Counter(f"c{number}" for number in range(60))
    assert 60 <= len(gateway.scheduler.submitted) < 120  # what had a result was not run again


async def set_ack_wait(gateway: RunningGateway, seconds: float) -> None:
    """Let the queue give a batch away after so many silent seconds."""
    info = await gateway.bus.jetstream.consumer_info(jetstream_batches.WORK, jetstream_batches.CONSUMER)
    info.config.ack_wait = seconds
    await gateway.bus.jetstream.add_consumer(jetstream_batches.WORK, info.config)

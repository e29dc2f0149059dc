"""Batches between two writes: recorded and not queued, over real NATS."""

import asyncio
import io
from dataclasses import replace
from typing import BinaryIO

import pytest

from roundhouse.clock import SystemClock
from roundhouse.errors import NotFound, Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.adapters.jetstream_batches import JetStreamBatches, JetStreamFiles, JetStreamQueue
from services.gateway.adapters.openai_calls import ENDPOINTS
from services.gateway.domain.batches import Batch, StoredFile, Submitter
from services.gateway.operations.batches import LOST_AFTER_S, BatchOperations, BatchStores, BatchWish, Upload
from services.gateway.operations.run_batch import BatchWorker, LineAnswer
from services.gateway.ports import Caller
from tests.fakes.clock import ManualClock
from tests.integration.gateway.running_gateway import RunningGateway


def lonely_batch() -> Batch:
    """A batch that was recorded, and of which nobody was told."""
    return Batch(
        batch_id="batch_lonely",
        tenant_id=TenantId("t1"),
        submitter=Submitter(KeyId("key-t1"), "h"),
        endpoint="/v1/chat/completions",
        input_file_id="file-none",
        created_s=1_000,
        expires_s=90_000,
    )


async def test_a_batch_that_its_gateway_never_queued_is_found_and_ended(gateway: RunningGateway) -> None:
    """Killed between the record and the queue: the sweep of any gateway queues it, once it is no longer new, and a
    worker brings it to its end. It would else count among the tenant's eight for ever."""
    stores, clock, batch = await opened(gateway.bus), ManualClock(1_000_000), lonely_batch()
    await stores.records.create(batch)
    operations = BatchOperations(stores, clock, tenant_bytes_max=0)
    await operations.sweep()
    assert not await stores.queue.has(batch.tenant_id, batch.batch_id), "it may be on its way"
    clock.advance(LOST_AFTER_S * 1_000)
    await operations.sweep()

    async with asyncio.timeout(60):
        while not (found := (await stores.records.find(batch.tenant_id, batch.batch_id)).batch).has_ended:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert [problem.code for problem in found.problems] == ["input_file_missing"]


async def test_a_batch_that_cannot_be_queued_is_not_there(gateway: RunningGateway) -> None:
    """The client is told so and tries again: nothing of the first try is left."""

    class Away(JetStreamQueue):
        async def put(self, tenant_id: TenantId, batch_id: str) -> None:
            raise Unavailable("batches cannot be queued now")

    stores = replace(await opened(gateway.bus), queue=Away(gateway.bus.jetstream))
    caller = Caller(TenantId("t1"), KeyId("key-t1"), frozenset({"inference"}), "h")
    operations = BatchOperations(stores, ManualClock(), tenant_bytes_max=10_000)
    file = await operations.upload(caller, Upload("in.jsonl", "batch", 3, io.BytesIO(b"{}\n")))
    with pytest.raises(Unavailable):
        await operations.create(caller, BatchWish(file.file_id, ENDPOINTS[0], "24h"), ENDPOINTS)
    assert await operations.all_batches(caller) == []


class OneAnswer:
    """Every line is answered."""

    async def run(self, batch: Batch, body: bytes, deadline_unix_ms: int) -> LineAnswer:
        """See `LineRunner.run`."""
        return LineAnswer(200, "r1", {"text": "the tenant's own"})


async def test_an_erasure_reaches_what_a_worker_is_just_writing(nats_url: str) -> None:
    """The tenant is erased while the output file of its batch is being written: neither the file nor results stay."""
    bus = await NatsBus.connect(nats_url, name="test")
    stores = await opened(bus)
    operations = BatchOperations(stores, ManualClock(), tenant_bytes_max=10_000)

    class Erasing(JetStreamFiles):
        async def put(self, file: StoredFile, source: BinaryIO) -> None:
            if file.purpose == "batch_output":
                await operations.erase(file.tenant_id)
            await super().put(file, source)

    made = await JetStreamBatches.open(bus)
    caller = Caller(TenantId("erased"), KeyId("k"), frozenset({"inference"}), "h")
    line = b'{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{}}\n'
    file = await operations.upload(caller, Upload("in.jsonl", "batch", len(line), io.BytesIO(line)))
    batch = replace(lonely_batch(), tenant_id=TenantId("erased"), input_file_id=file.file_id, expires_s=2_000_000_000)
    batch = replace(batch, endpoint="/v1/embeddings")
    await stores.records.create(batch)
    writing = replace(stores, files=Erasing(made._records, made._files))
    with pytest.raises(NotFound):
        await BatchWorker(writing, OneAnswer(), SystemClock()).run(batch.tenant_id, batch.batch_id)
    assert await stores.files.all(batch.tenant_id) == []
    assert [result async for result in stores.results.all(batch)] == []
    await bus.close()


async def opened(bus: NatsBus) -> BatchStores:
    """The stores that all gateways share."""
    made = await JetStreamBatches.open(bus)
    return BatchStores(made.files, made.records, made.results, made.queue)

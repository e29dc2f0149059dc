"""Puts files and batches together from the parts that the gateway's composition root has anyway."""

import asyncio
from dataclasses import dataclass, replace

from starlette.routing import BaseRoute

from roundhouse.catalogue.store import CatalogueView
from roundhouse.clock import Clock
from roundhouse.event_bus import EventBus, NatsBus
from roundhouse.lifecycle import Lifecycle
from roundhouse.vocabulary import PriorityClass
from services.gateway.adapters.batch_lines import CallLines
from services.gateway.adapters.http_requests import RequestReader
from services.gateway.adapters.jetstream_batches import JetStreamBatches
from services.gateway.adapters.openai_batches import BatchRoutes
from services.gateway.adapters.openai_calls import OpenAICalls
from services.gateway.adapters.openai_files import FileRoutes
from services.gateway.adapters.openai_work import OpenAIWork
from services.gateway.operations.batches import BatchOperations, BatchStores
from services.gateway.operations.class_view import ClassView
from services.gateway.operations.run_batch import BatchWorker
from services.gateway.operations.run_request import RequestParts
from services.gateway.ports import TextCodecs

SWEEP_MS = 600_000  # a guess: how late a file whose time is over may go


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What there must be before there can be batches."""

    bus: EventBus
    parts: RequestParts
    catalogue: CatalogueView
    codecs: TextCodecs
    reader: RequestReader
    lifecycle: Lifecycle
    workers: int
    file_bytes_max: int
    tenant_file_bytes_max: int


@dataclass(frozen=True, slots=True)
class Batches:
    """What came of it; without JetStream there are no files and batches."""

    routes: list[BaseRoute]
    operations: BatchOperations | None
    workers: "Workers"


class Workers:
    """The gateway's workers on batches, which end before the connections that they use."""

    def __init__(self, workers: list[BatchWorker]) -> None:
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run them until `stop`; one that fails stops the process, as every background task."""
        self._tasks = [asyncio.create_task(worker.work_forever(), name="batch_worker") for worker in self._workers]
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks)
            for task in done:
                if not task.cancelled():
                    task.result()

    async def stop(self, drain_s: float) -> None:
        """Let running lines end within `drain_s`, then cancel them; their batches go to other gateways."""
        for worker in self._workers:
            worker.drain()
        if not self._tasks:
            return
        for worker, task in zip(self._workers, self._tasks, strict=True):
            if not worker.is_busy:
                task.cancel()
        _, late = await asyncio.wait(self._tasks, timeout=drain_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


async def open_batches(given: BatchParts) -> Batches:
    """Make the stores, start the workers, return the routes. Raises Unavailable."""
    if not isinstance(given.bus, NatsBus):
        return Batches([], None, Workers([]))
    opened = await JetStreamBatches.open(given.bus)
    stores = BatchStores(opened.files, opened.records, opened.results, opened.queue)
    operations = BatchOperations(stores, given.parts.clock, tenant_bytes_max=given.tenant_file_bytes_max)
    view = ClassView(given.catalogue, PriorityClass.BATCH)
    lines = CallLines(OpenAICalls(given.parts, OpenAIWork(view, given.codecs, given.parts.cluster)))
    # Each with a subscription of its own: two that wait on one would take each other's messages.
    queues = [replace(stores, queue=opened.queue) for _ in range(given.workers)]
    workers = Workers([BatchWorker(each, lines, given.parts.clock) for each in queues])
    given.lifecycle.spawn(workers.run(), "batch_workers")
    given.lifecycle.every(SWEEP_MS, operations.sweep, "file_sweep")
    files = FileRoutes(operations, given.reader, file_bytes_max=given.file_bytes_max)
    return Batches([*files.routes(), *BatchRoutes(operations, given.reader).routes()], operations, workers)


async def batch_operations(bus: EventBus, clock: Clock) -> BatchOperations | None:
    """What operators need of files and batches: nothing is uploaded through it. Raises Unavailable."""
    if not isinstance(bus, NatsBus):
        return None
    opened = await JetStreamBatches.open(bus)
    stores = BatchStores(opened.files, opened.records, opened.results, opened.queue)
    return BatchOperations(stores, clock, tenant_bytes_max=0)

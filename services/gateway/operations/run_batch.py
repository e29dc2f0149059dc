"""Runs batches: takes them from the queue, runs their lines in the batch class, and writes their files.

1. Read and check the whole input; a wrong line fails the batch before anything is spent. 2. Run the lines that have no
result yet, a few at a time; a refusal that waiting cures is waited for. 3. Write the output and error files from the
results, then the final state, then drop the results. Every step can be repeated by another gateway: a line's first
result is its only one, file names follow from the batch, and states only go forward. A gateway that is killed loses the
lines it was running, which another one runs again.
"""

import asyncio
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Protocol

import msgspec
import structlog

from roundhouse.clock import Clock
from roundhouse.errors import NotFound, RoundhouseError, Unavailable
from roundhouse.vocabulary import TenantId
from services.gateway.domain.batches import (
    LINE_BYTES_MAX,
    LINES_MAX,
    PROBLEMS_MAX,
    Batch,
    Line,
    LineProblem,
    LineResult,
    StoredFile,
    ending_of,
    entered,
    missing_result,
    read_line,
    result_json,
)
from services.gateway.operations.batch_ports import QueuedBatch
from services.gateway.operations.batches import BatchStores, changed, counted
from services.gateway.operations.shielding import finished_anyway

log = structlog.get_logger(__name__)

LINES_AT_ONCE = 8  # a guess: of one batch; the queues see to fairness, this bounds memory
TICK_MS = 1_000  # how soon a cancellation is seen, and how often progress is written
WORKING_MS = 3_000  # a fifth of the queue's patience
TAKE_MS = 1_000
PAUSE_MS_MIN, PAUSE_MS_MAX = 500, 30_000  # between tries of a line
FAULTS_MAX = 5  # tries of a line that the engine or the deadline fails; refusals that say when do not count
LINE_DEADLINE_MS = 600_000  # a guess: of one try, waiting included
KEEP_TRIES = 30  # with `TICK_MS` and the store's time-outs: longer than a server takes to come back
OUTPUTS = ("output", "errors")
OUTPUT_KEPT_S = 30 * 24 * 3600  # OpenAI

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What an endpoint answered. `retry_after_ms` None: another try would not help; 0: nobody knows when."""

    status: int
    request_id: str
    body: object
    retry_after_ms: int | None = None


class LineRunner(Protocol):
    """Runs one request of a batch."""

    async def run(self, batch: Batch, body: bytes, deadline_unix_ms: int) -> LineAnswer:
        """Never raises for what the endpoint answers. Cancellation ends the request and bills what was generated."""
        ...


class _Body(msgspec.Struct):
    body: msgspec.Raw


@dataclass(slots=True)
class _Progress:
    results: dict[int, bool] = field(default_factory=dict)  # line → whether it succeeded

    @property
    def completed(self) -> int:
        return sum(self.results.values())

    @property
    def failed(self) -> int:
        return len(self.results) - self.completed


class BatchWorker:
    """One of the gateway's workers on batches; `work_forever` runs one batch at a time."""

    def __init__(self, stores: BatchStores, lines: LineRunner, clock: Clock) -> None:
        self._stores = stores
        self._lines = lines
        self._clock = clock
        self._draining = False
        self.is_busy = False
        """Whether it has a batch at hand; one that only waits may be cancelled at any time."""

    def drain(self) -> None:
        """Begin no further line; the batch at hand goes to another gateway once its running lines have ended."""
        self._draining = True

    async def work_forever(self) -> None:
        """Take batches and run them until told to drain, or cancelled, which ends the running lines too."""
        while not self._draining:
            try:
                taken = await self._stores.queue.take(TAKE_MS)
                if taken is not None:
                    self.is_busy = True
                    await self._work(taken)
                    self.is_busy = False
            except Unavailable as error:
                self.is_busy = False
                log.warning("batch_work_waits", reason=error.message)
                await self._clock.sleep_ms(TICK_MS)

    async def _work(self, taken: QueuedBatch) -> None:
        try:
            async with self._heard_of(taken):
                await self.run(taken.tenant_id, taken.batch_id)
        except NotFound:
            log.info("batch_erased", tenant_id=taken.tenant_id, batch_id=taken.batch_id)
        except (Unavailable, asyncio.CancelledError):
            with suppress(Unavailable):
                await finished_anyway(taken.give_back())
            raise
        except Exception as fault:  # noqa: BLE001 - a batch that breaks this code must not break it for ever
            where = "".join(traceback.format_tb(fault.__traceback__)[-6:])  # without its text, which may quote a prompt
            log.error("batch_failed", batch_id=taken.batch_id, error=type(fault).__name__, where=where)
            await self._fail(taken.tenant_id, taken.batch_id, [LineProblem("internal_error", "The batch failed.")])
        await taken.done()

    @asynccontextmanager
    async def _heard_of(self, taken: QueuedBatch) -> AsyncIterator[None]:
        async def forever() -> None:
            while True:
                await self._clock.sleep_ms(WORKING_MS)
                with suppress(Unavailable):
                    await taken.working()

        task = asyncio.create_task(forever(), name="batch_working")
        try:
            yield
        finally:
            task.cancel()

    async def run(self, tenant_id: TenantId, batch_id: str) -> None:
        """Bring a batch to its end. Idempotent. Raises NotFound (it was erased), Unavailable."""
        try:
            batch = (await self._stores.records.find(tenant_id, batch_id)).batch
            if not batch.has_ended:
                with tempfile.TemporaryFile() as source:
                    await self._run_from(batch, source)
        except NotFound:  # what was written since the erasure goes too
            await self._stores.results.forget(tenant_id, batch_id)
            for what in OUTPUTS:
                await self._stores.files.delete(tenant_id, _file_id(batch_id, what))
            raise
        await self._stores.results.forget(tenant_id, batch_id)

    async def _run_from(self, batch: Batch, source: BinaryIO) -> None:
        try:
            await self._stores.files.read(batch.tenant_id, batch.input_file_id, source)
        except NotFound:
            gone = [LineProblem("input_file_missing", "The input file was deleted.")]
            await self._fail(batch.tenant_id, batch.batch_id, gone)
            return
        lines, problems = await asyncio.to_thread(scan, source, batch.endpoint)
        if problems:
            await self._fail(batch.tenant_id, batch.batch_id, problems)
            return
        batch = await self._change(batch, lambda one: _begun(one, len(lines), self._now_s()))
        progress = _Progress()
        async for result in self._stores.results.all(batch):
            progress.results[result.number] = result.is_success
        is_over = await self._run_lines(batch, lines, source, progress)
        if not is_over:
            raise Unavailable("this gateway is draining")
        await self._finish(batch, lines)

    async def _fail(self, tenant_id: TenantId, batch_id: str, problems: list[LineProblem]) -> None:
        def failed(one: Batch) -> Batch:
            return one if one.has_ended else replace(entered(one, "failed", self._now_s()), problems=tuple(problems))

        await changed(self._stores.records, tenant_id, batch_id, failed)

    async def _run_lines(self, batch: Batch, lines: list[Line], source: BinaryIO, progress: _Progress) -> bool:
        """Run what has no result; False if lines are left because this gateway drains."""
        left = iter([line for line in lines if line.number not in progress.results])
        running = [
            asyncio.create_task(self._run_some(batch, left, source, progress), name="batch_lines")
            for _ in range(min(LINES_AT_ONCE, len(lines)))
        ]
        try:
            while running:
                done, _ = await asyncio.wait(running, timeout=TICK_MS / 1000, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                running = [task for task in running if not task.done()]
                if await self._is_stopped(batch, len(lines), progress):
                    return True
            return len(progress.results) >= len(lines)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _is_stopped(self, batch: Batch, total: int, progress: _Progress) -> bool:
        """Write the progress; whether the batch was cancelled or its time is over. Raises NotFound, Conflict."""
        try:
            seen = await self._change(batch, lambda one: counted(one, total, progress.completed, progress.failed))
        except Unavailable:
            return self._now_s() >= batch.expires_s  # the records are away for a while: running lines go on
        return "cancelling" in seen.times or self._now_s() >= batch.expires_s

    async def _run_some(self, batch: Batch, lines: Iterator[Line], source: BinaryIO, progress: _Progress) -> None:
        for line in lines:
            if self._draining:
                return
            source.seek(line.offset)
            body = bytes(msgspec.json.decode(source.read(line.length), type=_Body).body)
            result = await self._result(batch, line, body)
            # What has run is billed, so what it answered is kept, even if the batch is cancelled at this moment.
            await finished_anyway(self._keep(batch, result))
            progress.results[line.number] = result.is_success

    async def _keep(self, batch: Batch, result: LineResult) -> None:
        """Keep a result; a store that is away is tried again for a while. Raises Unavailable."""
        for _ in range(KEEP_TRIES):
            try:
                await self._stores.results.add(batch, result)
                return
            except Unavailable:
                await self._clock.sleep_ms(TICK_MS)
        raise Unavailable("results cannot be written now")

    async def _result(self, batch: Batch, line: Line, body: bytes) -> LineResult:
        faults, pause_ms = 0, PAUSE_MS_MIN
        while True:
            deadline_ms = min(self._clock.now_ms() + LINE_DEADLINE_MS, batch.expires_s * 1000)
            answer = await self._lines.run(batch, body, deadline_ms)
            faults += answer.status in (500, 502, 504)
            if answer.retry_after_ms is None or faults >= FAULTS_MAX:
                return LineResult(
                    line.number, line.custom_id, status=answer.status, request_id=answer.request_id, body=answer.body
                )
            await self._clock.sleep_ms(min(PAUSE_MS_MAX, answer.retry_after_ms or pause_ms))
            pause_ms = min(PAUSE_MS_MAX, 2 * pause_ms)

    async def _finish(self, batch: Batch, lines: list[Line]) -> None:
        batch = await self._change(batch, lambda one: entered(one, "finalizing", self._now_s()))
        ending = ending_of(batch, self._now_s())
        missing = {line.number: line for line in lines}
        completed = failed = 0
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            async for result in self._stores.results.all(batch):
                if missing.pop(result.number, None) is None:
                    continue
                completed += result.is_success
                failed += not result.is_success
                _write(output if result.is_success else errors, batch, result)
            if not missing:
                ending = "completed" if ending == "expired" else ending
            for line in missing.values():
                _write(errors, batch, missing_result(line, ending))
            output_id, error_id = [
                await self._file(batch, what, content) for what, content in zip(OUTPUTS, (output, errors), strict=True)
            ]

        def ended(one: Batch) -> Batch:
            done = counted(one, len(lines), completed, failed)
            return replace(entered(done, ending, self._now_s()), output_file_id=output_id, error_file_id=error_id)

        await self._change(batch, ended)

    async def _file(self, batch: Batch, what: str, content: BinaryIO) -> str | None:
        size = content.tell()
        if size == 0:
            return None
        content.seek(0)
        now_s = self._now_s()
        file = StoredFile(
            file_id=_file_id(batch.batch_id, what),
            tenant_id=batch.tenant_id,
            filename=f"{batch.batch_id}_{what}.jsonl",
            purpose="batch_output",
            size=size,
            created_s=now_s,
            expires_s=now_s + OUTPUT_KEPT_S,
        )
        await self._stores.files.put(file, content)
        return file.file_id

    async def _change(self, batch: Batch, change: "Change") -> Batch:
        return await changed(self._stores.records, batch.tenant_id, batch.batch_id, change)

    def _now_s(self) -> int:
        return self._clock.now_ms() // 1000


class Change(Protocol):
    """A batch and what it should become."""

    def __call__(self, batch: Batch, /) -> Batch:
        """The batch, changed."""
        ...


def _begun(batch: Batch, total: int, now_s: int) -> Batch:
    begun = batch if "cancelling" in batch.times else entered(batch, "in_progress", now_s)
    return counted(begun, total, begun.completed, begun.failed)


def _file_id(batch_id: str, what: str) -> str:
    return f"file-{batch_id.removeprefix('batch_')}-{what}"


def _write(target: BinaryIO, batch: Batch, result: LineResult) -> None:
    target.write(_encode(result_json(batch.batch_id, result)) + b"\n")


def scan(source: BinaryIO, endpoint: str) -> tuple[list[Line], list[LineProblem]]:
    """Every line of an input, or what is wrong with it. Blocking; memory is that of one line and the places of all."""
    source.seek(0)
    lines: list[Line] = []
    problems: list[LineProblem] = []
    seen: set[str] = set()
    offset = number = 0
    while text := source.readline(LINE_BYTES_MAX + 2):
        number += 1
        begin, offset = offset, offset + len(text)
        if not text.strip():
            continue
        if len(lines) >= LINES_MAX:
            problems.append(LineProblem("too_many_lines", f"A batch has at most {LINES_MAX} requests.", number))
            break
        found = read_line(text, number, begin, endpoint)
        if isinstance(found, Line) and found.custom_id in seen:
            found = LineProblem("duplicate_custom_id", "Each 'custom_id' must be there once.", number, "custom_id")
        if isinstance(found, Line):
            seen.add(found.custom_id)
            lines.append(found)
        else:
            problems.append(found)
        if len(problems) >= PROBLEMS_MAX or (isinstance(found, LineProblem) and found.code == "line_too_long"):
            break
    if not lines and not problems:
        problems.append(LineProblem("empty_file", "The input file has no requests."))
    return lines, problems


def retry_of(error: RoundhouseError, status: int) -> int | None:
    """Whether another try may help, as `LineAnswer.retry_after_ms` says it."""
    if status == 429:
        return error.retry_after_ms
    return (error.retry_after_ms or 0) if status >= 500 else None

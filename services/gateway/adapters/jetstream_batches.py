"""Files, batches, their results and the queue of work in JetStream, all on disk and shared by every gateway.

| what | where |
| --- | --- |
| contents | object store `gateway_files`, objects `<tenant>/<id>` |
| records | key-value bucket `gateway_records`, keys `file.<tenant>.<id>` and `batch.<tenant>.<id>` |
| results | stream `BATCH_RESULTS`, a subject a line that takes one message: a second result is refused there |
| work | stream `BATCH_WORK`, a work queue: a message a batch, given to another gateway after 15 silent seconds |

Ids in subjects and keys are encoded, so a tenant's name cannot leave its place (invariant 16).
Decision: docs/decisions/0099-batches.md.
"""

import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.errors import Error as JetStreamError

from roundhouse.errors import Conflict, NotFound, Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.subjects import encode_token
from roundhouse.vocabulary import TenantId
from services.gateway.domain.batches import Batch, LineResult, StoredFile
from services.gateway.operations.batch_ports import QueuedBatch, Recorded

FILES, RECORDS = "gateway_files", "gateway_records"
RESULTS, WORK = "BATCH_RESULTS", "BATCH_WORK"
CONSUMER = "gateways"
ACK_WAIT_S = 15.0  # a gateway that died gives its batches to another within this time
RESULTS_AGE_S = 3 * 24 * 3600.0  # a batch ends after one day; what a lost one left behind goes by itself
RESULT_BYTES_MAX = 900_000  # compressed; below NATS' largest message of 1 MiB
READ_TIMEOUT_S = 5.0
_ONE_PER_SUBJECT = 10077  # NATS: "maximum messages per subject exceeded"
_FAULTS = (NatsError, JetStreamError, TimeoutError, OSError)

_encode = msgspec.json.Encoder().encode
_file = msgspec.json.Decoder(StoredFile).decode
_batch = msgspec.json.Decoder(Batch).decode
_result = msgspec.json.Decoder(LineResult).decode
Value = TypeVar("Value")


class JetStreamBatches:
    """The open stores. Make it with `open`."""

    def __init__(self, jetstream: JetStreamContext, records: Any, files: Any) -> None:
        self._jetstream = jetstream
        self._records = records
        self._files = files

    @classmethod
    async def open(cls, bus: NatsBus) -> "JetStreamBatches":
        """Make what is missing and open it; again after every reconnection. Raises Unavailable."""
        jetstream = bus.jetstream
        await _ensure(jetstream)
        bus.on_reconnected(lambda: _ensure(jetstream))
        try:
            return cls(jetstream, await jetstream.key_value(RECORDS), await jetstream.object_store(FILES))
        except _FAULTS as error:
            raise Unavailable("JetStream does not open the stores of files and batches") from error

    @property
    def files(self) -> "JetStreamFiles":
        """See `FileStore`."""
        return JetStreamFiles(self._records, self._files)

    @property
    def records(self) -> "JetStreamBatchRecords":
        """See `BatchRecords`."""
        return JetStreamBatchRecords(self._records)

    @property
    def results(self) -> "JetStreamResults":
        """See `BatchResults`."""
        return JetStreamResults(self._jetstream)

    @property
    def queue(self) -> "JetStreamQueue":
        """See `BatchQueue`."""
        return JetStreamQueue(self._jetstream)


async def _ensure(jetstream: JetStreamContext) -> None:
    try:
        try:
            await jetstream.key_value(RECORDS)
        except BucketNotFoundError:
            await jetstream.create_key_value(bucket=RECORDS, history=1, storage=StorageType.FILE)
        try:
            await jetstream.object_store(FILES)
        except BucketNotFoundError:
            await jetstream.create_object_store(FILES, config=ObjectStoreConfig(bucket=FILES, storage=StorageType.FILE))
        await jetstream.add_stream(
            StreamConfig(
                name=RESULTS,
                subjects=["rh.v1.batch.result.>"],
                storage=StorageType.FILE,
                max_msgs_per_subject=1,
                discard=DiscardPolicy.NEW,
                discard_new_per_subject=True,
                max_age=RESULTS_AGE_S,
            )
        )
        await jetstream.add_stream(
            StreamConfig(
                name=WORK,
                subjects=["rh.v1.batch.work.>"],
                storage=StorageType.FILE,
                retention=RetentionPolicy.WORK_QUEUE,
            )
        )
        config = ConsumerConfig(durable_name=CONSUMER, ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S)
        await jetstream.add_consumer(WORK, config)
    except _FAULTS as error:
        raise Unavailable("JetStream does not make the stores of files and batches") from error


class JetStreamFiles:
    """`FileStore`. The record is written after the content and removed before it, so what is listed can be read."""

    def __init__(self, records: Any, objects: Any) -> None:
        self._records = records
        self._objects = objects

    async def put(self, file: StoredFile, source: BinaryIO) -> None:
        """See `FileStore.put`."""
        try:
            await self._objects.put(_object(file.tenant_id, file.file_id), source)
            await self._records.put(_key("file", file.tenant_id, file.file_id), _encode(file))
        except _FAULTS as error:
            raise Unavailable("files cannot be written now") from error

    async def find(self, tenant_id: TenantId, file_id: str) -> StoredFile:
        """See `FileStore.find`."""
        data, _ = await _entry(self._records, "file", tenant_id, file_id)
        return _file(data)

    async def all(self, tenant_id: TenantId) -> list[StoredFile]:
        """See `FileStore.all`."""
        found = [_file(data) for data in await _values(self._records, f"file.{encode_token(tenant_id)}.*")]
        return sorted(found, key=lambda file: (file.created_s, file.file_id), reverse=True)

    async def read(self, tenant_id: TenantId, file_id: str, target: BinaryIO) -> None:
        """See `FileStore.read`."""
        try:
            await self._objects.get(_object(tenant_id, file_id), writeinto=target)
        except NotFoundError as error:
            raise _no_such("file") from error
        except _FAULTS as error:
            raise Unavailable("files cannot be read now") from error

    async def delete(self, tenant_id: TenantId, file_id: str) -> None:
        """See `FileStore.delete`."""
        try:
            await self._records.purge(_key("file", tenant_id, file_id))
            with suppress(NotFoundError):
                await self._objects.delete(_object(tenant_id, file_id))
        except _FAULTS as error:
            raise Unavailable("files cannot be written now") from error

    async def ended(self, now_s: int) -> list[StoredFile]:
        """See `FileStore.ended`."""
        found = [_file(data) for data in await _values(self._records, "file.>")]
        return [file for file in found if file.is_gone(now_s)]


class JetStreamBatchRecords:
    """`BatchRecords`."""

    def __init__(self, records: Any) -> None:
        self._records = records

    async def create(self, batch: Batch) -> None:
        """See `BatchRecords.create`."""
        await self._write(batch, 0)

    async def find(self, tenant_id: TenantId, batch_id: str) -> Recorded:
        """See `BatchRecords.find`."""
        data, revision = await _entry(self._records, "batch", tenant_id, batch_id)
        return Recorded(_batch(data), revision)

    async def all(self, tenant_id: TenantId) -> list[Batch]:
        """See `BatchRecords.all`."""
        found = [_batch(data) for data in await _values(self._records, f"batch.{encode_token(tenant_id)}.*")]
        return sorted(found, key=lambda batch: (batch.created_s, batch.batch_id), reverse=True)

    async def unended(self) -> list[Batch]:
        """See `BatchRecords.unended`."""
        found = [_batch(data) for data in await _values(self._records, "batch.>")]
        return [batch for batch in found if not batch.has_ended]

    async def change(self, recorded: Recorded, batch: Batch) -> None:
        """See `BatchRecords.change`."""
        await self._write(batch, recorded.revision)

    async def delete(self, tenant_id: TenantId, batch_id: str) -> None:
        """See `BatchRecords.delete`."""
        try:
            await self._records.purge(_key("batch", tenant_id, batch_id))
        except _FAULTS as error:
            raise Unavailable("batches cannot be written now") from error

    async def _write(self, batch: Batch, revision: int) -> None:
        try:
            await self._records.update(_key("batch", batch.tenant_id, batch.batch_id), _encode(batch), last=revision)
        except KeyWrongLastSequenceError as error:
            raise Conflict("the batch was changed meanwhile") from error
        except _FAULTS as error:
            raise Unavailable("batches cannot be written now") from error


class JetStreamResults:
    """`BatchResults`."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self._jetstream = jetstream

    async def add(self, batch: Batch, result: LineResult) -> bool:
        """See `BatchResults.add`. An answer that is too long for a message is told as such."""
        data = zlib.compress(_encode(result), 1)
        if len(data) > RESULT_BYTES_MAX:
            code, message = "answer_too_long", "The answer is too long to be part of a batch."
            short = LineResult(result.number, result.custom_id, code=code, message=message)
            data = zlib.compress(_encode(short), 1)
        try:
            await self._jetstream.publish(_results(batch.tenant_id, batch.batch_id, str(result.number)), data)
        except APIError as error:
            if error.err_code == _ONE_PER_SUBJECT:
                return False
            raise Unavailable("results cannot be written now") from error
        except _FAULTS as error:
            raise Unavailable("results cannot be written now") from error
        return True

    async def all(self, batch: Batch) -> AsyncIterator[LineResult]:
        """See `BatchResults.all`."""
        subject = _results(batch.tenant_id, batch.batch_id, "*")
        try:
            info = await self._jetstream.stream_info(RESULTS, subjects_filter=subject)
            left = len(info.state.subjects or {})
            if left == 0:
                return
            subscription = await self._jetstream.subscribe(subject, stream=RESULTS, ordered_consumer=True)
            try:
                while left:
                    message = await subscription.next_msg(timeout=READ_TIMEOUT_S)
                    left -= 1
                    yield _result(zlib.decompress(message.data))
            finally:
                await subscription.unsubscribe()
        except _FAULTS as error:
            raise Unavailable("results cannot be read now") from error

    async def forget(self, tenant_id: TenantId, batch_id: str) -> None:
        """See `BatchResults.forget`."""
        try:
            await self._jetstream.purge_stream(RESULTS, subject=_results(tenant_id, batch_id, "*"))
        except _FAULTS as error:
            raise Unavailable("results cannot be written now") from error


class JetStreamQueue:
    """`BatchQueue`."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self._jetstream = jetstream
        self._pull: Any = None

    async def put(self, tenant_id: TenantId, batch_id: str) -> None:
        """See `BatchQueue.put`."""
        data = _encode([tenant_id, batch_id])
        try:
            await self._jetstream.publish(_work(tenant_id, batch_id), data, headers={"Nats-Msg-Id": batch_id})
        except _FAULTS as error:
            raise Unavailable("batches cannot be queued now") from error

    async def has(self, tenant_id: TenantId, batch_id: str) -> bool:
        """See `BatchQueue.has`: a work queue keeps a message until it is acknowledged."""
        try:
            info = await self._jetstream.stream_info(WORK, subjects_filter=_work(tenant_id, batch_id))
        except _FAULTS as error:
            raise Unavailable("the queue of batches cannot be read now") from error
        return bool(info.state.subjects)

    async def take(self, wait_ms: int) -> QueuedBatch | None:
        """See `BatchQueue.take`."""
        try:
            if self._pull is None:
                self._pull = await self._jetstream.pull_subscribe_bind(CONSUMER, stream=WORK)
            [message] = await self._pull.fetch(1, timeout=wait_ms / 1000)
        except (NatsTimeout, TimeoutError):
            return None
        except _FAULTS as error:
            self._pull = None
            raise Unavailable("batches cannot be taken now") from error
        tenant_id, batch_id = msgspec.json.decode(message.data, type=tuple[str, str])
        return _Taken(TenantId(tenant_id), batch_id, message)


class _Taken:
    def __init__(self, tenant_id: TenantId, batch_id: str, message: Any) -> None:
        self.tenant_id = tenant_id
        self.batch_id = batch_id
        self._message = message

    async def working(self) -> None:
        await self._said(self._message.in_progress())

    async def done(self) -> None:
        await self._said(self._message.ack_sync(timeout=READ_TIMEOUT_S))

    async def give_back(self) -> None:
        await self._said(self._message.nak())

    async def _said(self, call: Any) -> None:
        try:
            await call
        except _FAULTS as error:
            raise Unavailable("the queue of batches cannot be told now") from error


async def _entry(records: Any, kind: str, tenant_id: TenantId, name: str) -> tuple[bytes, int]:
    try:
        entry = await records.get(_key(kind, tenant_id, name))
    except KeyNotFoundError as error:
        raise _no_such(kind) from error
    except _FAULTS as error:
        raise Unavailable(f"{kind}s cannot be read now") from error
    return entry.value, entry.revision


async def _values(records: Any, pattern: str) -> list[bytes]:
    try:
        watcher = await records.watch(pattern, ignore_deletes=True)
        try:
            found: list[bytes] = []
            while (entry := await watcher.updates(timeout=READ_TIMEOUT_S)) is not None:
                found.append(entry.value)
            return found
        finally:
            await watcher.stop()
    except _FAULTS as error:
        raise Unavailable("records cannot be listed now") from error


def _no_such(kind: str) -> NotFound:
    return NotFound(f"There is no such {kind}.", code=f"{kind}_not_found", param=f"{kind}_id")


def _key(kind: str, tenant_id: TenantId, name: str) -> str:
    return f"{kind}.{encode_token(tenant_id)}.{encode_token(name)}"


def _object(tenant_id: TenantId, file_id: str) -> str:
    return f"{encode_token(tenant_id)}/{encode_token(file_id)}"


def _results(tenant_id: TenantId, batch_id: str, line: str) -> str:
    return f"rh.v1.batch.result.{encode_token(tenant_id)}.{encode_token(batch_id)}.{line}"


def _work(tenant_id: TenantId, batch_id: str) -> str:
    return f"rh.v1.batch.work.{encode_token(tenant_id)}.{encode_token(batch_id)}"

"""What tenants do with files and batches: keep, list, start, cancel, remove. The work itself is in `run_batch`."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from roundhouse.clock import Clock
from roundhouse.errors import Conflict, InvalidInput, LimitExceeded, NotFound, Unavailable
from roundhouse.vocabulary import TenantId
from services.gateway.domain.batches import (
    ACTIVE_MAX,
    WINDOW_S,
    Batch,
    StoredFile,
    Submitter,
    entered,
    metadata_problem,
)
from services.gateway.operations.batch_ports import BatchQueue, BatchRecords, BatchResults, FileStore
from services.gateway.operations.shielding import finished_anyway
from services.gateway.ports import Caller

UPLOAD_PURPOSES = ("batch",)
EXPIRES_S_MIN, EXPIRES_S_MAX = 3_600, 30 * 24 * 3600  # OpenAI
FILENAME_CHARACTERS_MAX = 255
LOST_AFTER_S = 300  # longer than a batch takes into the queue, and than the two minutes for which NATS drops repeats
CHANGE_TRIES = 20  # a guess: others write a batch's record at most once a second


@dataclass(frozen=True, slots=True)
class BatchStores:
    """Everything that keeps files and batches."""

    files: FileStore
    records: BatchRecords
    results: BatchResults
    queue: BatchQueue


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as it was sent."""

    filename: str
    purpose: str
    size: int
    content: BinaryIO
    expires_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class BatchWish:
    """A batch as it was asked for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = field(default_factory=dict)


async def changed(records: BatchRecords, tenant_id: TenantId, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
    """Apply `change` to a batch, again if somebody else was quicker. Raises NotFound, Conflict, Unavailable."""
    for _ in range(CHANGE_TRIES):
        recorded = await records.find(tenant_id, batch_id)
        wanted = change(recorded.batch)
        if wanted == recorded.batch:
            return wanted
        try:
            await records.change(recorded, wanted)
        except Conflict:
            continue
        return wanted
    raise Conflict("the batch changes too fast")


class BatchOperations:
    """See the module. `tenant_bytes_max` bounds what a tenant's files may take together."""

    def __init__(self, stores: BatchStores, clock: Clock, *, tenant_bytes_max: int) -> None:
        self._stores = stores
        self._clock = clock
        self._tenant_bytes_max = tenant_bytes_max

    async def upload(self, caller: Caller, upload: Upload) -> StoredFile:
        """Keep a file. Not idempotent. Raises InvalidInput (also when the tenant's room is used up), Unavailable."""
        if upload.purpose not in UPLOAD_PURPOSES:
            raise InvalidInput(f"must be one of {', '.join(UPLOAD_PURPOSES)}", param="purpose")
        expires = upload.expires_after_s
        if expires is not None and not EXPIRES_S_MIN <= expires <= EXPIRES_S_MAX:
            raise InvalidInput(f"must be {EXPIRES_S_MIN} to {EXPIRES_S_MAX} seconds", param="expires_after")
        now_s = self._now_s()
        file = StoredFile(
            file_id=f"file-{secrets.token_hex(12)}",
            tenant_id=caller.tenant_id,
            filename=_shown(upload.filename),
            purpose=upload.purpose,
            size=upload.size,
            created_s=now_s,
            expires_s=0 if expires is None else now_s + expires,
        )
        await self._check_room(caller.tenant_id, upload.size)
        await self._stores.files.put(file, upload.content)
        try:
            # Again, with this file counted: of two that came together neither may stay if both are too much.
            await self._check_room(caller.tenant_id, 0)
        except InvalidInput:
            await self._stores.files.delete(caller.tenant_id, file.file_id)
            raise
        return file

    async def file(self, caller: Caller, file_id: str) -> StoredFile:
        """Raises NotFound, Unavailable."""
        file = await self._stores.files.find(caller.tenant_id, file_id)
        if file.is_gone(self._now_s()):
            raise NotFound("There is no such file.", code="file_not_found", param="file_id")
        return file

    async def all_files(self, caller: Caller) -> list[StoredFile]:
        """Newest first. Raises Unavailable."""
        now_s = self._now_s()
        return [file for file in await self._stores.files.all(caller.tenant_id) if not file.is_gone(now_s)]

    async def read_file(self, caller: Caller, file_id: str, target: BinaryIO) -> StoredFile:
        """Write a file's content into `target`. Raises NotFound, Unavailable."""
        file = await self.file(caller, file_id)
        await self._stores.files.read(caller.tenant_id, file_id, target)
        return file

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        """Raises NotFound, InvalidInput (a batch still reads it), Unavailable."""
        await self.file(caller, file_id)
        batches = await self._stores.records.all(caller.tenant_id)
        if any(batch.input_file_id == file_id and not batch.has_ended for batch in batches):
            raise InvalidInput("A batch that has not ended reads this file.", param="file_id")
        await self._stores.files.delete(caller.tenant_id, file_id)

    async def create(self, caller: Caller, wish: BatchWish, endpoints: tuple[str, ...]) -> Batch:
        """Start a batch. Not idempotent. Raises InvalidInput, NotFound, LimitExceeded, Unavailable."""
        if wish.endpoint not in endpoints:
            raise InvalidInput(f"must be one of {', '.join(endpoints)}", param="endpoint")
        if wish.completion_window != "24h":
            raise InvalidInput("must be '24h'", param="completion_window")
        if problem := metadata_problem(wish.metadata):
            raise InvalidInput(problem, param="metadata")
        await self.file(caller, wish.input_file_id)
        active = [batch for batch in await self._stores.records.all(caller.tenant_id) if not batch.has_ended]
        if len(active) >= ACTIVE_MAX:
            raise LimitExceeded(f"At most {ACTIVE_MAX} batches run at a time.", code="batch_limit_exceeded")
        now_s = self._now_s()
        batch = Batch(
            batch_id=f"batch_{secrets.token_hex(12)}",
            tenant_id=caller.tenant_id,
            submitter=Submitter(caller.key_id, caller.key_hash, caller.limits, caller.family),
            endpoint=wish.endpoint,
            input_file_id=wish.input_file_id,
            created_s=now_s,
            expires_s=now_s + WINDOW_S,
            metadata=wish.metadata,
        )
        await self._stores.records.create(batch)
        try:
            await self._stores.queue.put(caller.tenant_id, batch.batch_id)
        except BaseException:
            await finished_anyway(self._unmake(batch))  # if it is queued after all, its worker finds no record
            raise
        return batch

    async def _unmake(self, batch: Batch) -> None:
        with suppress(Unavailable):  # then the sweep queues it
            await self._stores.records.delete(batch.tenant_id, batch.batch_id)

    async def batch(self, caller: Caller, batch_id: str) -> Batch:
        """Raises NotFound, Unavailable."""
        return (await self._stores.records.find(caller.tenant_id, batch_id)).batch

    async def all_batches(self, caller: Caller) -> list[Batch]:
        """Newest first. Raises Unavailable."""
        return await self._stores.records.all(caller.tenant_id)

    async def cancel(self, caller: Caller, batch_id: str) -> Batch:
        """Stop a batch; what has run stays in its files. Idempotent. Raises NotFound, InvalidInput, Unavailable."""
        now_s = self._now_s()

        def cancelling(batch: Batch) -> Batch:
            if batch.status in ("completed", "failed", "expired"):
                raise InvalidInput(f"A batch that is {batch.status} cannot be cancelled.", param="batch_id")
            return batch if "cancelling" in batch.times else entered(batch, "cancelling", now_s)

        return await changed(self._stores.records, caller.tenant_id, batch_id, cancelling)

    async def erase(self, tenant_id: TenantId) -> int:
        """Remove every file, batch and result of a tenant; how many there were. Raises Unavailable."""
        batches, files = await self._stores.records.all(tenant_id), await self._stores.files.all(tenant_id)
        for batch in batches:
            await self._stores.records.delete(tenant_id, batch.batch_id)  # its worker stops when it finds none
            await self._stores.results.forget(tenant_id, batch.batch_id)
        for file in files:
            await self._stores.files.delete(tenant_id, file.file_id)
        return len(batches) + len(files)

    async def sweep(self) -> None:
        """Remove the files whose time is over, and queue the batches that nobody has: a gateway was killed after it had
        recorded one, and before it had queued it. Raises Unavailable."""
        for file in await self._stores.files.ended(self._now_s()):
            await self._stores.files.delete(file.tenant_id, file.file_id)
        oldest_s = self._now_s() - LOST_AFTER_S
        for batch in await self._stores.records.unended():
            if batch.created_s <= oldest_s and not await self._stores.queue.has(batch.tenant_id, batch.batch_id):
                await self._stores.queue.put(batch.tenant_id, batch.batch_id)

    async def _check_room(self, tenant_id: TenantId, more: int) -> None:
        used = sum(file.size for file in await self._stores.files.all(tenant_id))
        if used + more > self._tenant_bytes_max:
            raise InvalidInput(
                f"Your files may take {self._tenant_bytes_max} bytes together; delete some.",
                code="file_quota_exceeded",
                param="file",
            )

    def _now_s(self) -> int:
        return self._clock.now_ms() // 1000


def _shown(filename: str) -> str:
    shown = "".join(character for character in filename if character.isprintable())
    return shown[:FILENAME_CHARACTERS_MAX] or "file"


def counted(batch: Batch, total: int, completed: int, failed: int) -> Batch:
    """The batch with its progress."""
    return replace(batch, total=total, completed=completed, failed=failed)

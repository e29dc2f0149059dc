"""Where files and batches lie, and how gateways share the work on batches. All of it survives every gateway."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from roundhouse.vocabulary import TenantId
from services.gateway.domain.batches import Batch, LineResult, StoredFile


class FileStore(Protocol):
    """Files by tenant: no call can name another tenant's."""

    async def put(self, file: StoredFile, source: BinaryIO) -> None:
        """Keep a file; readable only once it is whole. Idempotent by id. Raises Unavailable.

        Cancelled midway, there is no such file."""
        ...

    async def find(self, tenant_id: TenantId, file_id: str) -> StoredFile:
        """Raises NotFound, Unavailable."""
        ...

    async def all(self, tenant_id: TenantId) -> list[StoredFile]:
        """Every file of a tenant, newest first, ended ones too. Raises Unavailable."""
        ...

    async def read(self, tenant_id: TenantId, file_id: str, target: BinaryIO) -> None:
        """Write the content into `target`. Raises NotFound, Unavailable."""
        ...

    async def delete(self, tenant_id: TenantId, file_id: str) -> None:
        """Idempotent. Raises Unavailable."""
        ...

    async def ended(self, now_s: int) -> list[StoredFile]:
        """Files of all tenants whose time is over. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A batch as it was read; `revision` is for `BatchRecords.change`."""

    batch: Batch
    revision: int


class BatchRecords(Protocol):
    """Batches by tenant, changed by compare-and-set."""

    async def create(self, batch: Batch) -> None:
        """Raises Conflict, Unavailable."""
        ...

    async def find(self, tenant_id: TenantId, batch_id: str) -> Recorded:
        """Raises NotFound, Unavailable."""
        ...

    async def all(self, tenant_id: TenantId) -> list[Batch]:
        """Every batch of a tenant, newest first. Raises Unavailable."""
        ...

    async def unended(self) -> list[Batch]:
        """Batches of all tenants that have not ended. Raises Unavailable."""
        ...

    async def change(self, recorded: Recorded, batch: Batch) -> None:
        """Replace what was read. Raises Conflict if somebody else changed it meanwhile, Unavailable."""
        ...

    async def delete(self, tenant_id: TenantId, batch_id: str) -> None:
        """Idempotent. Raises Unavailable."""
        ...


class BatchResults(Protocol):
    """Results of lines until their batch's files are written: the first result of a line is its only one."""

    async def add(self, batch: Batch, result: LineResult) -> bool:
        """Keep it; False if the line had one already, which stays. Raises Unavailable."""
        ...

    def all(self, batch: Batch) -> AsyncIterator[LineResult]:
        """Every result, in the order in which they came. Raises Unavailable."""
        ...

    async def forget(self, tenant_id: TenantId, batch_id: str) -> None:
        """Drop them. Idempotent. Raises Unavailable."""
        ...


class QueuedBatch(Protocol):
    """A batch in this process's hands; given to another one if it is not heard of for some time."""

    tenant_id: TenantId
    batch_id: str

    async def working(self) -> None:
        """Still at it. Raises Unavailable."""
        ...

    async def done(self) -> None:
        """Take it out of the queue. Raises Unavailable."""
        ...

    async def give_back(self) -> None:
        """Let another process go on at once. Raises Unavailable."""
        ...


class BatchQueue(Protocol):
    """Batches that wait for a gateway."""

    async def put(self, tenant_id: TenantId, batch_id: str) -> None:
        """Idempotent within minutes. Raises Unavailable."""
        ...

    async def has(self, tenant_id: TenantId, batch_id: str) -> bool:
        """Whether it waits or somebody has it in hands. Raises Unavailable."""
        ...

    async def take(self, wait_ms: int) -> QueuedBatch | None:
        """The next one, or None after `wait_ms`. Raises Unavailable."""
        ...

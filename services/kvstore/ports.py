"""What the kvstore's operations need of the world. Adapters implement these; tests pass fakes.

`tests/contract/test_block_arena.py` holds the fake and the real arena to one contract.
"""

from collections.abc import Iterator
from typing import Protocol

from services.kvstore.domain.disk_index import DiskRecord


class DiskFault(Exception):
    """The disk did not do what it was asked. Never reaches a caller: it is counted, and the block is a miss."""


class BlockArena(Protocol):
    """A fixed piece of memory that the engines of the node share with this process."""

    @property
    def path(self) -> str:
        """What an engine maps; empty if nothing can be mapped."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in bytes; never changes."""
        ...

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes from `offset`, readable and writable, without a copy. Raises ValueError outside of the arena.

        Release it before the arena is closed."""
        ...


class BlockLog(Protocol):
    """Blocks on disk, in segments that grow at the end and are removed whole. Blocking; all may raise DiskFault."""

    @property
    def writing(self) -> int:
        """The segment being appended to; -1 when there is none."""
        ...

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of the segments."""
        ...

    @property
    def bytes_held(self) -> int:
        """What they take, also their dead parts."""
        ...

    def fits(self, length: int) -> bool:
        """Whether a segment can hold such a block at all."""
        ...

    def needs_segment(self, length: int) -> bool:
        """Whether appending such a block starts a new segment."""
        ...

    def scan(self) -> Iterator[DiskRecord]:
        """What earlier processes left, once, before anything else."""
        ...

    def append(self, record: DiskRecord, data: memoryview) -> DiskRecord:
        """Write a block; its record with its place."""
        ...

    def read_into(self, record: DiskRecord, into: memoryview) -> None:
        """Read a block into the start of `into`. Unchecked. From any thread."""
        ...

    def destroy(self, records: tuple[DiskRecord, ...]) -> None:
        """Overwrite blocks so that nobody finds or reads them again, also after a restart."""
        ...

    def remove(self, number: int) -> None:
        """Remove a segment. Idempotent."""
        ...

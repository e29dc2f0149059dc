"""What the kvstore's operations need of the world. Adapters implement these; tests pass fakes.

`tests/contract/test_block_arena.py` holds the fake and the real arena to one contract.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from services.kvstore.domain.disk_index import DiskRecord
from services.kvstore.domain.records import NOTHING_SHARED, Shared


class DiskFault(Exception):
    """The disk did not do what it was asked. Never reaches a caller: it is counted, and the block is a miss."""


class BlockCorrupt(DiskFault):
    """The disk gave other bytes than were written. It may go on being asked for others."""


class PeerFault(Exception):
    """A peer did not do what it was asked, or not in time. Never reaches a caller: it is counted, and what is
    missing is a miss."""


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

    def forget(self, salt: bytes) -> None:
        """Destroy what the blocks of a salt are encrypted with, if they are. Idempotent."""
        ...

    def remove(self, number: int) -> None:
        """Remove a segment. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """What is wanted of a peer: blocks of the chain `keys` after the first `skip`, waiting `wait_ms` for its disk.

    With a `hold`, which ends at the peer once the last block has been sent, also as they become stored there."""

    salt: bytes
    keys: tuple[bytes, ...]
    skip: int
    wait_ms: int
    shared: Shared = NOTHING_SHARED
    hold: str = ""


@dataclass(frozen=True, slots=True)
class BlockHead:
    """What a peer says of a block before its bytes; the checksum is that of its first writer."""

    key: bytes
    length: int
    checksum: int
    model_digest: bytes
    erasures_read: int = 0  # by the peer, when it said so; see `erasure_book`


@dataclass(frozen=True, slots=True)
class Ordered:
    """An erasure that was ordered: of whom, and its number."""

    tenant: str
    number: int


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """What a peer has at `sequence` of its block events: leading bytes of keys."""

    node_id: str
    incarnation: str
    sequence: int
    keys: frozenset[bytes]


class Landing(Protocol):
    """Where blocks of a peer are put, one after the other, in order of the chain."""

    def begin(self, head: BlockHead) -> memoryview | None:
        """The place for a block's bytes, exactly its length; None = not wanted: stop. Valid until the transfer ends."""
        ...

    def landed(self) -> None:
        """The bytes of the block begun last are all there."""
        ...


class ErasureOrders(Protocol):
    """The erasures that operators have ordered, numbered from 1."""

    async def after(self, sequence: int) -> tuple[int, Mapping[bytes, Ordered]]:
        """The newest number, and what was ordered after `sequence`, by the SHA-256 of the salts.

        Raises Unavailable."""
        ...


class ErasureMark(Protocol):
    """How far a node has carried them out."""

    def load(self) -> int:
        """0 = nothing yet."""
        ...

    def save(self, sequence: int) -> None:
        """Never raises: what is not kept is done again."""
        ...


class PeerTransport(Protocol):
    """How bytes come from another node. `tests/contract/test_peer_transport.py` holds every one to this contract."""

    async def fetch(self, address: str, request: PeerRequest, landing: Landing, *, timeout_ms: int) -> None:
        """Bring what the peer has, in order, until it ends or `landing` stops. Raises PeerFault; what landed before
        stays landed. Cancelled, nothing is written any more once this returns."""
        ...

    async def snapshot(self, address: str, key_bytes: int, *, timeout_ms: int) -> PeerKeys:
        """Everything a peer has. Raises PeerFault."""
        ...

    async def close(self) -> None:
        """Let go of connections. Idempotent."""
        ...

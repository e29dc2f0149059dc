"""The records and outcomes of the block table."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from services.kvstore.domain.slot_arena import Slot

ROOT = b""  # the parent of the first block of a prompt


class BlockPlace(NamedTuple):
    """Where a block lies: `offset` and `length` in bytes. The checksum is 0 while the block is being written.

    A tuple, as `WrittenBlock`, because one is made of every block of a call, in a third of the time."""

    key: bytes
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who asks for a lease, and for how long from now."""

    client_id: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Shared:
    """How many leading blocks of a chain lie in a sharing group's space instead of the tenant's own."""

    salt: bytes = b""
    blocks: int = 0

    def salt_at(self, index: int, own: bytes) -> bytes:
        """The salt of block `index` of a chain whose own salt is `own`."""
        return self.salt if index < self.blocks else own


NOTHING_SHARED = Shared()


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks somebody wants to write: one chain, parents before children, all `length` bytes long and of one salt.

    `parent_salt`: what the blocks above may be stored with besides `salt`, that of a sharing group.
    """

    salt: bytes
    model_digest: bytes
    parent_key: bytes  # of keys[0]; ROOT for the first block of a prompt
    keys: tuple[bytes, ...]
    length: int
    parent_salt: bytes = b""


class WrittenBlock(NamedTuple):
    """What a block is to be, and what was found in the arena; equal unless it is torn, or not looked at."""

    key: bytes
    checksum_claimed: int
    checksum_found: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """A leading run of stored blocks, leased to be read."""

    lease_id: str
    blocks: tuple[BlockPlace, ...]


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One stored block and what it was stored with."""

    place: BlockPlace
    salt: bytes
    model_digest: bytes
    parent_key: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """A run of stored blocks, each under the one before, leased so that another tier can copy them."""

    lease_id: str
    blocks: tuple[HeldBlock, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """The first key is not stored for this salt."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots to write into; keys that are stored or being written have none."""

    lease_id: str
    slots: tuple[BlockPlace, ...]


class RefusalReason(StrEnum):
    """Why nothing was reserved."""

    NOTHING_NEW = "nothing_new"  # every key is stored or being written
    PARENT_UNKNOWN = "parent_unknown"  # nobody could find the blocks
    LENGTH_DIFFERS = "length_differs"  # from the parent's: not one model
    TOO_LARGE = "too_large"  # for any extent
    NO_ROOM = "no_room"  # everything is leased or being written


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was reserved."""

    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Committed:
    """How many blocks became visible, and how many did not."""

    committed: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Erased:
    """What was dropped; `bytes_dropped` counts the blocks' own lengths."""

    blocks: int
    bytes_dropped: int
    blocks_left: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys that became visible and keys that went away, since they were last asked for."""

    stored: tuple[bytes, ...]
    dropped: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Counts of a block table. `units_free + units_held == units_total` (invariant 12)."""

    units_total: int
    units_free: int
    units_held: int
    units_leased: int
    blocks: int
    leases: int
    hits: int  # blocks found
    misses: int  # blocks asked for and not found
    evictions: int
    evictions_awaited: int  # of them, those that a writer had to wait for
    corrupt: int
    leases_expired: int


@dataclass(slots=True, eq=False)
class Block:
    """One block of the table. Only the table changes it.

    `pins` counts the leases on it or below it: who pins a block pins its parents. `condemned`: no longer in the table,
    its slot is given back with the last pin.
    """

    key: bytes
    salt: bytes
    model_digest: bytes
    parent_key: bytes
    slot: Slot
    length: int
    depth: int = 0  # blocks above it
    checksum: int = 0
    stored: bool = False
    condemned: bool = False
    erased: bool = False  # its bytes are to be overwritten before its slot is another's; pinned until then
    pins: int = 0
    uses: int = 0  # requests that found it
    used_ms: int = 0  # when it was stored or found last
    think_ms: int = 0  # how long its session thinks between two turns; 0 = not known
    kind: int = 0  # see `reuse_forecast`
    tick: int = 0  # see `eviction`, also for the next two
    listed: bool = False
    listed_kind: int = 0
    shown: BlockPlace | None = None  # where it lies, once it is stored

    def place(self) -> BlockPlace:
        """Where it lies."""
        return self.shown or BlockPlace(self.key, self.slot.offset, self.length, self.checksum)

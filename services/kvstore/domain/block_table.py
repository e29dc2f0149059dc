"""The table of one node's KV blocks: what is stored for which salt, who may read or write it, and what goes first.

How a block lives:

1. `reserve` gives its writer a slot and a lease. Nobody sees the block yet.
2. The writer fills the slot and calls `commit` with a checksum. If the arena holds those bytes and the parent is
   stored, the block is visible; else its slot is free again. A writer that dies loses the slot when its lease ends.
3. `acquire` leases the longest stored run of a chain of keys to a reader. Pinned blocks never move and never go.
4. Without leases it is in the reuse order, and is dropped when room is needed. What is dropped while leased is
   condemned: found by nobody, its slot given back with the last lease.

Invariant 11: a block is found only with the salt that stored it. Invariant 12: units free + held = total; no lease
outlives its time (every call with `now_ms` first ends what is due). A stored block's parent is stored, and a pinned
block's parents are pinned. Not here: bytes, checksums, other tiers. Not thread-safe.
"""

from collections.abc import Iterable, Iterator, Sequence

from services.kvstore.domain.eviction import Rank, ReuseOrder, rank
from services.kvstore.domain.leases import Lease, LeaseBook
from services.kvstore.domain.records import (
    ROOT,
    Acquired,
    Block,
    BlockPlace,
    Changes,
    Committed,
    Erased,
    Held,
    Holder,
    Missed,
    NewBlocks,
    RefusalReason,
    Refused,
    Reserved,
    TableStatistics,
    WrittenBlock,
)
from services.kvstore.domain.slot_arena import NoSlot, Slot, SlotArena

GUARANTEED_SHARE = 0.5  # of the arena is divided among the salts in it; a loud tenant can flush the other half only


class BlockTable:
    """All blocks of one arena. Lease ids start with `incarnation`."""

    def __init__(self, arena: SlotArena, incarnation: str) -> None:
        """An empty table over an empty arena."""
        self._arena = arena
        self._leases = LeaseBook(incarnation)
        self._order = ReuseOrder(self._is_guarded)
        self._salt_units: dict[bytes, int] = {}
        self._now_ms = 0
        self._blocks: dict[bytes, Block] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._by_salt: dict[bytes, dict[bytes, None]] = {}
        self._by_offset: dict[int, Block] = {}  # condemned blocks too
        self._stored: list[bytes] = []
        self._dropped: list[bytes] = []
        self._visible = self._units_pinned = 0
        self._hits = self._misses = self._evictions = self._corrupt = self._expired = 0

    def acquire(self, salt: bytes, keys: Sequence[bytes], holder: Holder, now_ms: int) -> Acquired | Missed:
        """Lease the longest stored run of `keys`, a chain from the first block of a prompt. O(run)."""
        self.expire(now_ms)
        run = tuple(self._run(salt, keys))
        self._hits += len(run)
        self._misses += len(keys) - len(run)
        if not run:
            return Missed()
        for block in run:
            block.uses += 1
            self._pin(block)
        lease = self._leases.open(holder, now_ms, run)
        return Acquired(lease.lease_id, tuple(block.place() for block in run))

    def run_length(self, salt: bytes, keys: Sequence[bytes]) -> int:
        """How many leading `keys` are stored; uses and leases nothing."""
        return sum(1 for _ in self._run(salt, keys))

    def hold(self, key: bytes, holder: Holder, now_ms: int) -> Held | Missed:
        """Lease one stored block, and so those above it, without counting it as a use. O(depth)."""
        self.expire(now_ms)
        block = self._blocks.get(key)
        if block is None or not block.stored:
            return Missed()
        chain = [block]
        while chain[-1].parent_key != ROOT:
            chain.append(self._blocks[chain[-1].parent_key])
        chain.reverse()
        for member in chain:
            self._pin(member)
        lease = self._leases.open(holder, now_ms, chain)
        return Held(lease.lease_id, block.place(), block.salt, block.model_digest, block.parent_key)

    def is_stored(self, key: bytes, salt: bytes) -> bool:
        """Whether a block is visible for a salt."""
        block = self._blocks.get(key)
        return block is not None and block.stored and block.salt == salt

    def places_of(self, salt: bytes) -> list[BlockPlace]:
        """Every slot that holds, or is to hold, a block of a salt, condemned ones too. O(blocks)."""
        return [block.place() for block in self._by_offset.values() if block.salt == salt]

    def usage(self, salt: bytes) -> tuple[int, int]:
        """Blocks of a salt in the table, also those being written, and their bytes."""
        keys = self._by_salt.get(salt, ())
        return len(keys), sum(self._blocks[key].length for key in keys)

    def release(self, lease_id: str, now_ms: int) -> None:
        """End a lease; what it wrote without a commit is dropped. Idempotent."""
        self.expire(now_ms)
        lease = self._leases.close(lease_id)
        if lease is not None:
            self._end(lease)

    def reserve(self, new: NewBlocks, holder: Holder, now_ms: int) -> Reserved | Refused:
        """Give slots for those of `new.keys` that are not there, evicting for them; stops where room ends."""
        self.expire(now_ms)
        units = self._arena.class_of(new.length)
        if isinstance(units, NoSlot):
            return Refused(RefusalReason.TOO_LARGE)
        chain = self._parents(new)
        if isinstance(chain, RefusalReason):
            return Refused(chain)
        for block in chain:
            self._pin(block)
        writing, reason = self._reserve_chain(new, units, chain)
        if not writing:
            self._unpin_chain(chain)
            return Refused(reason)
        lease = self._leases.open(holder, now_ms, chain, writing)
        return Reserved(lease.lease_id, tuple(block.place() for block in writing))

    def places(self, lease_id: str) -> dict[bytes, BlockPlace]:
        """What an open lease gives access to, by key; empty if it has ended."""
        lease = self._leases.find(lease_id)
        blocks = (lease.writing or lease.chain) if lease is not None else ()
        return {block.key: block.place() for block in blocks}

    def parent_of_lease(self, lease_id: str) -> bytes:
        """What the first block that a lease writes stands under; ROOT if there is none."""
        lease = self._leases.find(lease_id)
        return lease.writing[0].parent_key if lease is not None and lease.writing else ROOT

    def commit(self, lease_id: str, written: Sequence[WrittenBlock], now_ms: int) -> Committed:
        """Make visible what was written well, and end the reservation. A second commit rejects everything."""
        self.expire(now_ms)
        lease = self._leases.close(lease_id)
        if lease is None:
            return Committed(0, len(written))
        self._corrupt += sum(block.checksum_claimed != block.checksum_found for block in written)
        good = {block.key: block for block in written if block.checksum_claimed == block.checksum_found}
        committed = 0
        for block in lease.writing:
            if block.key in good and not block.condemned and self._parent_is_stored(block):
                self._show(block, good[block.key].checksum_found)
                committed += 1
        self._end(lease)
        return Committed(committed, max(0, len(written) - committed))

    def recheck(self, key: bytes, checksum_found: int) -> bool:
        """Drop a stored block, and all below it, whose bytes no longer match. Returns whether it was dropped."""
        block = self._blocks.get(key)
        if block is None or not block.stored or block.checksum == checksum_found:
            return False
        self._corrupt += 1
        self._drop_subtree(block)
        return True

    def erase_salt(self, salt: bytes, now_ms: int) -> Erased:
        """Drop every block of a salt, also what is being written. Leased slots are given back with their leases."""
        self.expire(now_ms)
        blocks = [self._blocks[key] for key in self._by_salt.get(salt, ())]
        erased = Erased(len(blocks), sum(block.length for block in blocks))
        for block in blocks:
            if self._blocks.get(block.key) is block:
                self._drop_subtree(block)
        return erased

    def expire(self, now_ms: int) -> int:
        """End every lease whose time is up; returns how many. Idempotent."""
        self._now_ms = now_ms
        ended = self._leases.expired(now_ms)
        for lease in ended:
            self._end(lease)
        self._expired += len(ended)
        return len(ended)

    def take_changes(self) -> Changes:
        """What became visible and what went since the last call. A key may be in both."""
        changes = Changes(tuple(self._stored), tuple(self._dropped))
        self._stored, self._dropped = [], []
        return changes

    def statistics(self) -> TableStatistics:
        """Counts now. O(extents)."""
        return TableStatistics(
            units_total=self._arena.units_total,
            units_free=self._arena.units_free,
            units_held=self._arena.units_held,
            units_leased=self._units_pinned,
            blocks=self._visible,
            leases=len(self._leases),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            corrupt=self._corrupt,
            leases_expired=self._expired,
        )

    # Finding

    def _run(self, salt: bytes, keys: Iterable[bytes]) -> Iterator[Block]:
        parent = ROOT
        for key in keys:
            block = self._blocks.get(key)
            # Invariant 11: the salt is compared, though the key was made with it.
            if block is None or not block.stored or block.salt != salt or block.parent_key != parent:
                return
            yield block
            parent = key

    def _parents(self, new: NewBlocks) -> list[Block] | RefusalReason:
        """The blocks above `new`, root first, or why `new` cannot stand under them. O(depth)."""
        parents: list[Block] = []
        key = new.parent_key
        while key != ROOT:
            block = self._blocks.get(key)
            if block is None or block.salt != new.salt:
                return RefusalReason.PARENT_UNKNOWN
            if block.length != new.length:
                return RefusalReason.LENGTH_DIFFERS
            parents.append(block)
            key = block.parent_key
        parents.reverse()
        return parents

    def _parent_is_stored(self, block: Block) -> bool:
        if block.parent_key == ROOT:
            return True
        parent = self._blocks.get(block.parent_key)
        return parent is not None and parent.stored

    # Writing

    def _reserve_chain(self, new: NewBlocks, units: int, chain: list[Block]) -> tuple[list[Block], RefusalReason]:
        """Make blocks for the keys that are not there; pins every block of the keys and adds it to `chain`."""
        writing: list[Block] = []
        parent = new.parent_key
        for key in new.keys:
            block = self._blocks.get(key)
            if block is None:
                slot = self._make_room(units)
                if isinstance(slot, NoSlot):
                    return writing, RefusalReason.NO_ROOM
                block = Block(key, new.salt, new.model_digest, parent, slot, new.length, len(chain))
                self._enter(block)
                writing.append(block)
            elif (block.parent_key, block.salt, block.length) != (parent, new.salt, new.length):
                return writing, RefusalReason.PARENT_UNKNOWN
            self._pin(block)
            chain.append(block)
            parent = key
        return writing, RefusalReason.NOTHING_NEW

    def _enter(self, block: Block) -> None:
        self._blocks[block.key] = block
        self._by_offset[block.slot.offset] = block
        self._salt_units[block.salt] = self._salt_units.get(block.salt, 0) + block.slot.units
        self._by_salt.setdefault(block.salt, {})[block.key] = None
        self._children.setdefault(block.parent_key, {})[block.key] = None

    def _show(self, block: Block, checksum: int) -> None:
        block.stored, block.checksum = True, checksum
        self._visible += 1
        self._stored.append(block.key)

    def _end(self, lease: Lease) -> None:
        """Take back what a closed lease held; unwritten blocks go."""
        for block in lease.writing:
            if not block.stored and not block.condemned:
                self._drop_subtree(block)
        self._unpin_chain(lease.chain)

    # Holding

    def _pin(self, block: Block) -> None:
        if block.pins == 0:
            self._order.discard(block)
            self._units_pinned += block.slot.units
        block.pins += 1

    def _unpin_chain(self, chain: Sequence[Block]) -> None:
        """Children before parents, so that parents are worth no less."""
        for block in reversed(chain):
            self._unpin(block)

    def _unpin(self, block: Block) -> None:
        block.pins -= 1
        assert block.pins >= 0
        if block.pins:
            return
        self._units_pinned -= block.slot.units
        if block.condemned:
            self._free(block)
        else:
            assert block.stored
            self._order.add(block, self._now_ms)

    # Dropping

    def _make_room(self, units: int) -> Slot | NoSlot:
        slot = self._arena.take(units)
        while isinstance(slot, NoSlot) and self._evict_for(units):
            slot = self._arena.take(units)
        return slot

    def _evict_for(self, units: int) -> bool:
        """Evict the least worth of the class, or all of an extent worth less; False if nothing may go."""
        own, least = self._order.least(units), self._order.least_of_all()
        if least is None:
            return False
        if own is not least:
            extent = self._arena.extent_of(least.slot)
            greatest = self._order.greatest_rank(self._blocks_in(extent))
            if greatest is not None and (own is None or greatest < rank(own)):
                self._evict(self._blocks_in(extent))
                return True
        if own is not None:
            self._evict([own])
            return True
        return self._evict_any_extent()

    def _evict_any_extent(self) -> bool:
        """Clear the extent least worth keeping. O(blocks); only for a class that has nothing to give."""
        candidates: list[tuple[Rank, int]] = []
        for extent in self._arena.extents:
            greatest = self._order.greatest_rank(self._blocks_in(extent), guarded=True)
            if greatest is not None:
                candidates.append((greatest, extent))
        if not candidates:
            return False
        self._evict(self._blocks_in(min(candidates)[1]))
        return True

    def _is_guarded(self, salt: bytes) -> bool:
        """Whether a salt holds no more than its share: half of the arena, divided equally among those in it."""
        if len(self._salt_units) <= 1:
            return False
        share = GUARANTEED_SHARE * self._arena.units_total / len(self._salt_units)
        return self._salt_units.get(salt, 0) <= share

    def _blocks_in(self, extent: int) -> list[Block]:
        return [self._by_offset[offset] for offset in self._arena.held_in(extent)]

    def _evict(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.condemned:  # gone already, below another one
                self._order.evicted(block, self._now_ms)
                self._evictions += self._drop_subtree(block)

    def _drop_subtree(self, block: Block) -> int:
        """Remove a block and everything below it, children first; returns how many blocks that were."""
        subtree = [block]
        for member in subtree:  # grows while it runs
            subtree += [self._blocks[key] for key in self._children.get(member.key, ())]
        for member in reversed(subtree):
            self._drop(member)
        return len(subtree)

    def _drop(self, block: Block) -> None:
        assert block.key not in self._children, "a parent never goes before its children"
        del self._blocks[block.key]
        _remove(self._children, block.parent_key, block.key)
        _remove(self._by_salt, block.salt, block.key)
        self._salt_units[block.salt] -= block.slot.units
        if block.salt not in self._by_salt:
            del self._salt_units[block.salt]
        if block.stored:
            self._visible -= 1
            self._dropped.append(block.key)
        block.condemned = True
        if block.pins == 0:
            self._order.discard(block)
            self._free(block)

    def _free(self, block: Block) -> None:
        del self._by_offset[block.slot.offset]
        self._arena.give_back(block.slot)


def _remove(groups: dict[bytes, dict[bytes, None]], group: bytes, key: bytes) -> None:
    members = groups[group]
    del members[key]
    if not members:
        del groups[group]

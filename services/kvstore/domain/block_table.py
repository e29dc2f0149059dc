"""The table of one node's KV blocks: what is stored for which salt, who may read or write it, and what goes first.

How a block lives:

1. `reserve` gives its writer a slot and a lease. Nobody sees the block yet.
2. The writer fills the slot and calls `commit` with a checksum. If the arena holds those bytes and the parent is
   stored, the block is visible; else its slot is free again. A writer that dies loses the slot when its lease ends.
3. `acquire` leases the longest stored run of a chain of keys to a reader. Pinned blocks never move and never go.
4. Without leases, and with nothing below it, it is in the reuse order, and is dropped when room is needed. What is
   dropped while leased is condemned: found by nobody, its slot given back with the last lease.

Invariant 12: units free + held = total; no lease outlives its time (every call with `now_ms` first ends what is due).
A stored block's parent is stored, and a pinned block's parents are pinned. Which block stands under which, and who
finds it (invariant 11), is `block_forest`. Not here: bytes, checksums, other tiers. Not thread-safe.
"""

import itertools
from collections.abc import Iterable, Sequence

from services.kvstore.domain.block_forest import BlockForest
from services.kvstore.domain.leases import Lease, LeaseBook
from services.kvstore.domain.records import (
    NOTHING_SHARED,
    ROOT,
    Acquired,
    Block,
    BlockPlace,
    Changes,
    Committed,
    Erased,
    Held,
    HeldBlock,
    Holder,
    Missed,
    NewBlocks,
    RefusalReason,
    Refused,
    Reserved,
    Shared,
    TableStatistics,
    WrittenBlock,
)
from services.kvstore.domain.room import Room
from services.kvstore.domain.slot_arena import NoSlot, Slot, SlotArena
from services.kvstore.domain.use_history import UseHistory


class BlockTable:
    """All blocks of one arena. Lease ids start with `incarnation`."""

    def __init__(self, arena: SlotArena, incarnation: str) -> None:
        """An empty table over an empty arena."""
        self._arena = arena
        self._leases = LeaseBook(incarnation)
        self._now_ms = 0
        self._forest = BlockForest()
        self._history = UseHistory()
        self._room = Room(arena, self._forest.salts, self._forest.by_offset, self._history.forecast)
        self._order = self._room.order
        self._stored: list[bytes] = []
        self._dropped: list[bytes] = []
        self._visible = self._units_pinned = 0
        self._erased: dict[int, Block] = {}  # by offset: their bytes are still to be overwritten
        self._hits = self._misses = self._corrupt = self._expired = 0
        self._evictions = self._evictions_awaited = 0

    def acquire(
        self, salt: bytes, keys: Sequence[bytes], holder: Holder, now_ms: int, shared: Shared = NOTHING_SHARED
    ) -> Acquired | Missed:
        """Lease the longest stored run of `keys`, a chain from the first block of a prompt, as used now. O(run)."""
        outcome = self.lease(salt, keys, holder, now_ms, shared)
        run = self._leases.chain_of(outcome.lease_id) if isinstance(outcome, Acquired) else ()
        self._history.looked_up(run, keys[len(run) :], now_ms)
        self._hits += len(run)
        self._misses += len(keys) - len(run)
        return outcome

    def lease(
        self, salt: bytes, keys: Sequence[bytes], holder: Holder, now_ms: int, shared: Shared = NOTHING_SHARED
    ) -> Acquired | Missed:
        """As `acquire`, without counting it as a use. O(run)."""
        self.expire(now_ms)
        run = tuple(self._forest.run(salt, keys, shared))
        if not run:
            return Missed()
        for block in run:
            self._pin(block)
        lease = self._leases.open(holder, now_ms, run)
        return Acquired(lease.lease_id, tuple([block.shown for block in run if block.shown is not None]))

    def run_length(self, salt: bytes, keys: Sequence[bytes], shared: Shared = NOTHING_SHARED) -> int:
        """How many leading `keys` are stored; uses and leases nothing."""
        return sum(1 for _ in self._forest.run(salt, keys, shared))

    def stored_keys(self) -> list[bytes]:
        """Every visible block. O(blocks)."""
        return self._forest.stored_keys()

    def hold(self, keys: Sequence[bytes], bytes_max: int, holder: Holder, now_ms: int) -> Held | Missed:
        """Lease those leading `keys` that are stored, each under the one before, and what is above them, without
        counting it as a use; `bytes_max` of them, but at least one. O(depth)."""
        self.expire(now_ms)
        run: list[Block] = []
        for key in keys:
            block = self._forest.find(key)
            if block is None or not block.stored or (run and block.parent_key != run[-1].key):
                break
            if run and (len(run) + 1) * block.length > bytes_max:
                break
            run.append(block)
        if not run:
            return Missed()
        chain = [*self._forest.above(run[0]), *run]
        for member in chain:
            self._pin(member)
        lease = self._leases.open(holder, now_ms, chain)
        held = [HeldBlock(block.place(), block.salt, block.model_digest, block.parent_key) for block in run]
        return Held(lease.lease_id, tuple(held))

    def has(self, key: bytes, salt: bytes | None = None) -> bool:
        """Whether a block is visible, for that salt if one is given."""
        block = self._forest.find(key)
        return block is not None and block.stored and salt in (None, block.salt)

    def lies_at(self, place: BlockPlace) -> bool:
        """Whether a block is visible in the very slot and with the checksum that it had."""
        block = self._forest.find(place.key)
        return block is not None and block.shown == place

    def model_digest(self, key: bytes) -> bytes:
        """The model that made a block; empty if it is not here."""
        block = self._forest.find(key)
        return block.model_digest if block is not None else b""

    def was_used(self, key: bytes) -> bool:
        """Whether a block was found by another request than the one that brought it here."""
        block = self._forest.find(key)
        return block is not None and block.uses > 0

    def salts(self) -> tuple[bytes, ...]:
        """Every salt that has blocks here, also ones being written."""
        return self._forest.salts.salts()

    def usage(self, salt: bytes) -> tuple[int, int]:
        """Blocks of a salt in the table, also those being written or to be overwritten, and their bytes."""
        blocks = [*self._forest.blocks_of(salt), *self._to_be_overwritten(salt)]
        return len(blocks), sum(block.length for block in blocks)

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
        chain = self._forest.parents(new)
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

    def is_open(self, lease_id: str) -> bool:
        """Whether a lease has not ended."""
        return self._leases.find(lease_id) is not None

    def places(self, lease_id: str) -> dict[bytes, BlockPlace]:
        """What an open lease gives access to, by key; empty if it has ended."""
        lease = self._leases.find(lease_id)
        blocks = (lease.writing or lease.chain) if lease is not None else ()
        return {block.key: block.place() for block in blocks}

    def writing(self, lease_id: str) -> list[bytes]:
        """The keys that an open lease is to write, in order."""
        lease = self._leases.find(lease_id)
        return [block.key for block in lease.writing] if lease is not None else []

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
        block = self._forest.find(key)
        if block is None or not block.stored or block.checksum == checksum_found:
            return False
        self._corrupt += 1
        self._drop_subtree(block)
        return True

    def erase_salt(self, salt: bytes, now_ms: int) -> Erased:
        """Drop every block of a salt, also what is being written. What they hold is no other's before `overwritten`."""
        self.expire(now_ms)
        blocks = self._forest.blocks_of(salt)
        erased = Erased(len(blocks), sum(block.length for block in blocks))
        for block in self._forest.held_for(salt):
            if not block.erased:
                self._pin(block)
                block.erased = True
                self._erased[block.slot.offset] = block
        for block in blocks:
            if self._forest.find(block.key) is block:
                self._drop_subtree(block)
        self._history.forget(salt)
        return erased

    def to_overwrite(self, blocks_max: int, now_ms: int) -> list[BlockPlace]:
        """Where erased blocks lie that nobody writes any more. Overwrite them at once, and say so by `overwritten`.

        A reader who still copies one finds a wrong checksum, which is a miss."""
        self.expire(now_ms)
        ready = (block.place() for block in self._erased.values() if block.stored or block.pins == 1)
        return list(itertools.islice(ready, blocks_max))

    def overwritten(self, places: Sequence[BlockPlace]) -> None:
        """Their slots are given back, with their leases if there are any."""
        for place in places:
            self._unpin(self._erased.pop(place.offset))

    def is_overwritten(self, salt: bytes) -> bool:
        """Whether nothing that was erased of a salt is still to be overwritten."""
        return not self._to_be_overwritten(salt)

    def make_room(self, blocks_max: int, now_ms: int) -> int:
        """Evict up to about `blocks_max` blocks where a class has less room than it should; how many went.

        To be called again at once if any did, and every now and then: then no `reserve` has to evict."""
        self.expire(now_ms)
        before = self._evictions
        for victims in self._room.overdue(blocks_max, now_ms):
            self._evict(victims)
        return self._evictions - before

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
            evictions_awaited=self._evictions_awaited,
            corrupt=self._corrupt,
            leases_expired=self._expired,
        )

    def _to_be_overwritten(self, salt: bytes) -> list[Block]:
        return [block for block in self._erased.values() if block.salt == salt]

    def _parent_is_stored(self, block: Block) -> bool:
        return block.parent_key == ROOT or self.has(block.parent_key)

    def _reserve_chain(self, new: NewBlocks, units: int, chain: list[Block]) -> tuple[list[Block], RefusalReason]:
        """Make blocks for the keys that are not there; pins every block of the keys and adds it to `chain`."""
        writing: list[Block] = []
        find, parent = self._forest.find, new.parent_key
        for key in new.keys:
            block = find(key)
            if block is None:
                slot = self._make_room(units)
                if isinstance(slot, NoSlot):
                    return writing, RefusalReason.NO_ROOM
                block = Block(key, new.salt, new.model_digest, parent, slot, new.length, len(chain))
                self._forest.enter(block)
                writing.append(block)
            elif (block.parent_key, block.salt, block.length) != (parent, new.salt, new.length):
                return writing, RefusalReason.PARENT_UNKNOWN
            self._pin(block)
            chain.append(block)
            parent = key
        return writing, RefusalReason.NOTHING_NEW

    def _show(self, block: Block, checksum: int) -> None:
        block.stored, block.checksum = True, checksum
        self._history.stored(block, self._forest.find(block.parent_key), self._now_ms)
        block.shown = block.place()
        self._visible += 1
        self._stored.append(block.key)

    def _end(self, lease: Lease) -> None:
        """Take back what a closed lease held; unwritten blocks go."""
        for block in lease.writing:
            if not block.stored and not block.condemned:
                self._drop_subtree(block)
        self._unpin_chain(lease.chain)

    def _pin(self, block: Block) -> None:
        if block.pins == 0:
            if block.listed:
                self._order.discard(block)
            self._units_pinned += block.slot.units
        block.pins += 1

    def _unpin_chain(self, chain: Sequence[Block]) -> None:
        """Children before parents, so that parents are not listed in vain."""
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
        elif not self._forest.has_children(block):
            self._list(block)

    def _list(self, block: Block, *, uncovered: bool = False) -> None:
        """Let a block be evicted if nobody holds it and nothing hangs on it."""
        if not block.pins and block.stored and not block.condemned and not self._forest.has_children(block):
            self._order.add(block, self._now_ms, uncovered=uncovered)

    def _make_room(self, units: int) -> Slot | NoSlot:
        slot = self._arena.take(units)
        before = self._evictions
        while isinstance(slot, NoSlot) and (victims := self._room.victims(units, self._now_ms)):
            self._evict(victims)
            slot = self._arena.take(units)
        self._evictions_awaited += self._evictions - before
        return slot

    def _evict(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.condemned:  # gone already, below another one
                self._evictions += self._drop_subtree(block)

    def _drop_subtree(self, block: Block) -> int:
        """Remove a block and everything below it, children first; returns how many blocks that were."""
        subtree = self._forest.subtree(block)
        for member in reversed(subtree):
            self._drop(member)
        return len(subtree)

    def _drop(self, block: Block) -> None:
        self._forest.remove(block)
        if block.stored:
            self._visible -= 1
            self._dropped.append(block.key)
            self._history.dropped(block, self._visible)
        block.condemned = True
        self._order.discard(block)
        if block.pins == 0:
            self._free(block)
        parent = self._forest.find(block.parent_key)
        if parent is not None:
            self._list(parent, uncovered=True)

    def _free(self, block: Block) -> None:
        self._forest.vacate(block)
        self._arena.give_back(block.slot)

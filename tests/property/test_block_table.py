"""The block table under any order of calls: invariants 11 and 12, parents before children, nothing leased is lost."""

import hashlib
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import (
    ROOT,
    Acquired,
    BlockPlace,
    Holder,
    Missed,
    NewBlocks,
    Reserved,
    WrittenBlock,
)
from services.kvstore.domain.slot_arena import SlotArena

UNIT = 64
EXTENT_UNITS = 4
ARENA_UNITS = 16  # small, so that eviction is the rule
SALTS = st.sampled_from([b"one", b"two"])
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
LEASES_MS = st.integers(1, 50)


def keys_of(salt: bytes, length: int, path: list[int]) -> tuple[bytes, ...]:
    """A chain as the real keys are: each holds everything before it."""
    keys = [hashlib.sha256(b"%s|%d|%r" % (salt, length, path[: n + 1])).digest() for n in range(len(path))]
    return tuple(keys)


CHAINS = {
    key: keys[depth - 1] if depth else ROOT
    for salt, units in itertools.product((b"one", b"two"), (1, 2))
    for path in itertools.product((0, 1), repeat=5)
    for keys in [keys_of(salt, units, list(path))]
    for depth, key in enumerate(keys)
}
"""The parent of every key there can be."""


class BlockTableMachine(RuleBasedStateMachine):
    """Drives a table and keeps a plain model of who may touch which bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(SlotArena(ARENA_UNITS * UNIT, UNIT, EXTENT_UNITS * UNIT), "run")
        self.now_ms = 0
        self.writing: dict[str, tuple[int, tuple[BlockPlace, ...], bytes]] = {}
        self.reading: dict[str, tuple[int, tuple[BlockPlace, ...]]] = {}
        self.owner: dict[bytes, bytes] = {}  # key -> salt that stored it
        self.bytes_at: dict[int, bytes] = {}  # offset -> key written there

    leases = Bundle("leases")
    reads = Bundle("reads")

    @rule(target=leases, salt=SALTS, units=st.sampled_from([1, 2]), path=PATHS, skip=st.integers(0, 2), ms=LEASES_MS)
    def reserve(self, salt: bytes, units: int, path: list[int], skip: int, ms: int) -> str:
        """Ask for slots for the tail of a chain; slots never overlap anything that is held by a lease."""
        keys = keys_of(salt, units, path)
        skip = min(skip, len(keys) - 1)
        new = NewBlocks(salt, b"model", keys[skip - 1] if skip else ROOT, keys[skip:], units * UNIT)
        outcome = self.table.reserve(new, Holder("writer", ms), self.now_ms)
        if not isinstance(outcome, Reserved):
            return ""
        assert outcome.slots
        for place in outcome.slots:
            assert not self._overlaps_a_lease(place)
            self.bytes_at[place.offset] = place.key
        self.writing[outcome.lease_id] = (self.now_ms + ms, outcome.slots, salt)
        return outcome.lease_id

    @rule(lease_id=consumes(leases), torn=st.sets(st.integers(0, 4)))
    def commit(self, lease_id: str, torn: set[int]) -> None:
        """Commit, some blocks torn: never more becomes visible than was written well in time."""
        ends, slots, salt = self.writing.pop(lease_id, (0, (), b""))
        written = [WrittenBlock(p.key, p.offset, p.offset + (n in torn)) for n, p in enumerate(slots)]
        outcome = self.table.commit(lease_id, written, self.now_ms)
        assert outcome.committed + outcome.rejected == len(slots)
        assert outcome.committed <= sum(n not in torn for n in range(len(slots)))
        if ends <= self.now_ms:
            assert outcome.committed == 0
        self.owner.update({place.key: salt for place in slots})

    @rule(target=reads, salt=SALTS, asked=SALTS, units=st.sampled_from([1, 2]), path=PATHS, ms=LEASES_MS)
    def acquire(self, salt: bytes, asked: bytes, units: int, path: list[int], ms: int) -> str:
        """Invariant 11: only the salt that stored a block finds it, and its bytes are those stored under that key."""
        keys = keys_of(salt, units, path)
        outcome = self.table.acquire(asked, keys, Holder("reader", ms), self.now_ms)
        if isinstance(outcome, Missed):
            return ""
        assert asked == salt
        for key, place in zip(keys, outcome.blocks, strict=False):
            assert place.key == key
            assert self.owner[key] == asked
            assert self.bytes_at[place.offset] == key
        self.reading[outcome.lease_id] = (self.now_ms + ms, outcome.blocks)
        return outcome.lease_id

    @rule(lease_id=consumes(reads))
    def release(self, lease_id: str) -> None:
        """Until the lease ends, the bytes under it are untouched."""
        ends, places = self.reading.pop(lease_id, (0, ()))
        if ends > self.now_ms:
            assert all(self.bytes_at[place.offset] == place.key for place in places)
        self.table.release(lease_id, self.now_ms)

    @rule(ms=st.one_of(st.integers(1, 60), st.integers(500, 100_000)))
    def time_passes(self, ms: int) -> None:
        """Invariant 12: once the table has looked, only leases with time left are open."""
        self.now_ms += ms
        self.table.expire(self.now_ms)
        ends = [entry[0] for entry in self.writing.values()] + [entry[0] for entry in self.reading.values()]
        assert self.table.statistics().leases == sum(end > self.now_ms for end in ends)

    @rule(salt=SALTS)
    def erase(self, salt: bytes) -> None:
        """An erased salt finds nothing."""
        self.table.erase_salt(salt, self.now_ms)
        for units in (1, 2):
            for first in (0, 1):
                keys = keys_of(salt, units, [first])
                assert self.table.acquire(salt, keys, Holder("reader", 1), self.now_ms) == Missed()

    @rule(blocks_max=st.integers(1, 4))
    def what_was_erased_is_overwritten(self, blocks_max: int) -> None:
        """Its slots were nobody else's until now: none of them is being written, by whomever."""
        places = self.table.to_overwrite(blocks_max, self.now_ms)
        assert len(places) <= blocks_max
        written = [held for ends, held, *_ in self.writing.values() if ends > self.now_ms]
        offsets = {slot.offset for held in written for slot in held}
        assert not offsets & {place.offset for place in places}
        self.table.overwritten(places)

    @rule(salt=SALTS, units=st.sampled_from([1, 2]), path=PATHS)
    def bytes_rot(self, salt: bytes, units: int, path: list[int]) -> None:
        """A block found to be wrong is found no more, nor is anything below it."""
        keys = keys_of(salt, units, path)
        if self.table.recheck(keys[-1], 1):  # offsets are multiples of 64, so 1 is never right
            outcome = self.table.acquire(salt, keys, Holder("reader", 1), self.now_ms)
            assert isinstance(outcome, Missed) or len(outcome.blocks) < len(keys)
            if isinstance(outcome, Acquired):
                self.table.release(outcome.lease_id, self.now_ms)

    @rule(blocks_max=st.integers(1, 4))
    def room_is_made(self, blocks_max: int) -> None:
        """In the background: never more than a step, but for the blocks of one extent and those below them."""
        before = self.table.statistics().evictions
        evicted = self.table.make_room(blocks_max, self.now_ms)
        assert evicted == self.table.statistics().evictions - before <= blocks_max - 1 + ARENA_UNITS

    @invariant()
    def units_add_up(self) -> None:
        """Invariant 12: free + held = total; what is leased is held."""
        counts = self.table.statistics()
        assert counts.units_free + counts.units_held == counts.units_total == ARENA_UNITS
        assert counts.units_leased <= counts.units_held

    @invariant()
    def told_changes_add_up(self) -> None:
        """Whoever follows the changes knows exactly the visible blocks."""
        changes = self.table.take_changes()
        self.known = getattr(self, "known", 0) + len(changes.stored) - len(changes.dropped)
        assert self.known == self.table.statistics().blocks

    @invariant()
    def no_block_without_the_one_above(self) -> None:
        """A parent never goes before its children: whatever is stored, all that is above it is stored too."""
        stored = set(self.table.stored_keys())
        assert all(CHAINS[key] == ROOT or CHAINS[key] in stored for key in stored)

    def teardown(self) -> None:
        """When every lease has ended and every salt is erased, the arena is empty."""
        self.table.expire(self.now_ms + 1_000)
        for salt in (b"one", b"two"):
            self.table.erase_salt(salt, self.now_ms + 1_000)
        self.table.overwritten(self.table.to_overwrite(ARENA_UNITS, self.now_ms + 1_000))
        counts = self.table.statistics()
        assert (counts.units_held, counts.units_leased, counts.blocks, counts.leases) == (0, 0, 0, 0)

    def _overlaps_a_lease(self, place: BlockPlace) -> bool:
        live = [held for ends, held, *_ in self.writing.values() if ends > self.now_ms]
        live += [held for ends, held in self.reading.values() if ends > self.now_ms]
        return any(
            place.offset < other.offset + other.length and other.offset < place.offset + place.length
            for held in live
            for other in held
        )


TestBlockTable = BlockTableMachine.TestCase
TestBlockTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

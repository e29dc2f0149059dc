"""Which blocks lie on disk, and which go when the disk is full. Knows places, never bytes.

Blocks lie in segments that only grow and are removed whole. The index is closed upwards: a block is in it only if its
parent is, so a chain can always be read from its first block. Whoever uses a block uses its parents too, and later, so
a parent's last use is never older than its child's: dropping what has not been used never strands what has.

Room is made by giving up one segment. What was used since it was written, or belongs to a salt that has less than its
guaranteed share, is written again at the end; the rest is dropped with everything below it. That is CLOCK over a log
(second chance; Corbato 1968) with shares. At most `MOVED_SHARE` of a segment is written again, so that every segment
given up yields room. Decision: docs/decisions/0054-disk-tier.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.kvstore.domain.records import NOTHING_SHARED, ROOT, Shared

MOVED_SHARE = 0.5  # a segment given up frees at least this share; so each byte is rewritten at most once a byte written
MOSTLY_DEAD_SHARE = 0.25  # a segment with less alive than this is cheaper to give up than the oldest one
GUARANTEED_SHARE = 0.5  # of the disk is divided equally among the salts on it; a loud one fills the other half


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """One block on disk. `offset` is where its record starts in its segment; `span` is what it takes there, bytes.

    `seal` opens its bytes if they are encrypted; it changes when the block is written again."""

    key: bytes
    salt: bytes
    model_digest: bytes
    parent_key: bytes
    length: int
    checksum: int
    segment: int = -1
    offset: int = -1
    span: int = 0
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Give up `segment`: write `moved` again (parents before children), forget `dropped`."""

    segment: int
    moved: tuple[DiskRecord, ...]
    dropped: tuple[DiskRecord, ...]


@dataclass(frozen=True, slots=True)
class NothingToReclaim:
    """There is no segment but the one being written."""


@dataclass(slots=True)
class _Entry:
    record: DiskRecord
    used: int
    written: int
    children: dict[bytes, None] = field(default_factory=dict)


class DiskIndex:
    """The index of one disk. `salt_bytes_max` bounds what one salt may hold; 0 = no bound."""

    def __init__(self, capacity_bytes: int, segment_bytes: int, salt_bytes_max: int = 0) -> None:
        """An empty index. `capacity_bytes` below two segments leaves no room to move in and is an error."""
        assert capacity_bytes >= 2 * segment_bytes > 0
        self._segment_bytes = segment_bytes
        self.segments_max = capacity_bytes // segment_bytes
        self._salt_bytes_max = salt_bytes_max
        self._entries: dict[bytes, _Entry] = {}
        self._segments: dict[int, dict[bytes, None]] = {}
        self._salts: dict[bytes, dict[bytes, None]] = {}
        self._salt_bytes: dict[bytes, int] = {}
        self._tick = 0
        self._gone: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def segments(self) -> set[int]:
        """Segments in which something lies."""
        return set(self._segments)

    def holds(self, record: DiskRecord) -> bool:
        """Whether a block lies exactly there."""
        entry = self._entries.get(record.key)
        return entry is not None and entry.record == record

    def may_add(self, record: DiskRecord) -> bool:
        """Whether the block is new, its parent is here, and its salt has room. The table has compared their salts."""
        if record.key in self._entries:
            return False
        if record.parent_key != ROOT and record.parent_key not in self._entries:
            return False
        held = self._salt_bytes.get(record.salt, 0)
        return not self._salt_bytes_max or held + record.span <= self._salt_bytes_max

    def add(self, record: DiskRecord) -> bool:
        """Enter a block that has been written; False if `may_add` says no."""
        if not self.may_add(record):
            return False
        self._tick += 1
        self._entries[record.key] = _Entry(record, self._tick, self._tick)
        self._place(record)
        self._salts.setdefault(record.salt, {})[record.key] = None
        self._salt_bytes[record.salt] = self._salt_bytes.get(record.salt, 0) + record.span
        if record.parent_key != ROOT:
            self._entries[record.parent_key].children[record.key] = None
        return True

    def moved(self, record: DiskRecord, copy: DiskRecord) -> None:
        """A block lies where `copy` says now; its second chance is spent. Ignored if it has gone meanwhile."""
        entry = self._entries.get(record.key)
        if entry is None or entry.record != record:
            return
        self._unplace(record)
        entry.record = copy
        entry.written = entry.used
        self._place(entry.record)

    def restore(self, records: Iterable[DiskRecord]) -> list[DiskRecord]:
        """Enter what a scan found, in any order; gives out what it refused: orphans and second copies."""
        waiting = list(records)
        while True:
            left = [record for record in waiting if not self.add(record)]
            if len(left) == len(waiting):
                return left
            waiting = left

    def run(
        self, salt: bytes, keys: Sequence[bytes], have: int = 0, shared: Shared = NOTHING_SHARED
    ) -> list[DiskRecord]:
        """The longest run of `keys` after the first `have` that lies here for these salts (invariant 11)."""
        found: list[DiskRecord] = []
        parent_key = keys[have - 1] if have else ROOT
        for index, key in enumerate(keys[have:], have):
            entry = self._entries.get(key)
            if entry is None or entry.record.parent_key != parent_key:
                break
            if entry.record.salt != shared.salt_at(index, salt):
                break
            found.append(entry.record)
            parent_key = key
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that a chain (parents first) was used, in whatever tier it was found."""
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None:
                self._tick += 1
                entry.used = self._tick

    def drop(self, key: bytes) -> tuple[DiskRecord, ...]:
        """Forget a block and everything below it, children first; what was forgotten."""
        if key not in self._entries:
            return ()
        subtree = list(self._below(key))
        for record in reversed(subtree):
            self._forget(record)
        return tuple(reversed(subtree))

    def erase(self, salt: bytes) -> tuple[DiskRecord, ...]:
        """Forget everything of a salt; what was forgotten."""
        gone: list[DiskRecord] = []
        for key in tuple(self._salts.get(salt, ())):
            gone += self.drop(key)
        return tuple(gone)

    def drop_segment(self, segment: int) -> tuple[DiskRecord, ...]:
        """Forget everything in a segment that is gone, and what lies below it elsewhere."""
        gone: list[DiskRecord] = []
        for key in tuple(self._segments.get(segment, ())):
            gone += self.drop(key)
        return tuple(gone)

    def keys(self) -> list[bytes]:
        """Everything that lies here."""
        return list(self._entries)

    def take_gone(self) -> list[bytes]:
        """What went since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def salts(self) -> tuple[bytes, ...]:
        """Every salt that has blocks here."""
        return tuple(self._salts)

    def usage(self, salt: bytes) -> tuple[int, int]:
        """Blocks of a salt, and the bytes they take."""
        return len(self._salts.get(salt, ())), self._salt_bytes.get(salt, 0)

    def reclaim(self, segments: Iterable[int], writing: int) -> Reclaim | NothingToReclaim:
        """Choose one of the existing `segments`, but not the one being written, and forget what is not moved."""
        candidates = sorted(number for number in segments if number != writing)
        if not candidates:
            return NothingToReclaim()
        live = {number: self._live_bytes(number) for number in candidates}
        emptiest = min(candidates, key=lambda number: (live[number], number))
        mostly_dead = live[emptiest] <= MOSTLY_DEAD_SHARE * self._segment_bytes
        segment = emptiest if mostly_dead else candidates[0]
        moved = self._worth_moving(segment, everything=mostly_dead)
        kept = {record.key for record in moved}
        dropped: list[DiskRecord] = []
        for key in tuple(self._segments.get(segment, ())):
            if key not in kept:
                dropped += self.drop(key)
        return Reclaim(segment, tuple(record for record in moved if record.key in self._entries), tuple(dropped))

    # Inside

    def _worth_moving(self, segment: int, *, everything: bool) -> list[DiskRecord]:
        entries = [self._entries[key] for key in self._segments.get(segment, ())]
        guaranteed = GUARANTEED_SHARE * self.segments_max * self._segment_bytes / max(1, len(self._salts))
        entries = [
            entry
            for entry in entries
            if everything or entry.used > entry.written or self._salt_bytes[entry.record.salt] <= guaranteed
        ]
        entries.sort(key=lambda entry: -entry.used)
        room, chosen = MOVED_SHARE * self._segment_bytes, []
        for entry in entries:
            room -= entry.record.span
            if room < 0:
                break
            chosen.append(entry.record)
        return chosen

    def _live_bytes(self, segment: int) -> int:
        return sum(self._entries[key].record.span for key in self._segments.get(segment, ()))

    def _below(self, key: bytes) -> Iterator[DiskRecord]:
        waiting = [key]
        while waiting:
            entry = self._entries[waiting.pop()]
            yield entry.record
            waiting += entry.children

    def _forget(self, record: DiskRecord) -> None:
        del self._entries[record.key]
        self._gone.append(record.key)
        self._unplace(record)
        _remove(self._salts, record.salt, record.key)
        self._salt_bytes[record.salt] -= record.span
        if record.salt not in self._salts:
            del self._salt_bytes[record.salt]
        parent = self._entries.get(record.parent_key)
        if parent is not None:
            del parent.children[record.key]

    def _place(self, record: DiskRecord) -> None:
        self._segments.setdefault(record.segment, {})[record.key] = None

    def _unplace(self, record: DiskRecord) -> None:
        segment = self._segments[record.segment]
        del segment[record.key]
        if not segment:
            del self._segments[record.segment]


def _remove(groups: dict[bytes, dict[bytes, None]], group: bytes, key: bytes) -> None:
    members = groups[group]
    del members[key]
    if not members:
        del groups[group]

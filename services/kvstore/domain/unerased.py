"""Records that the index has forgotten and whose bytes still lie on disk: what an erasure has yet to overwrite.

An erasure is done when nothing of its salt is here. Until then it counts as left, however often it was interrupted or
refused. A segment that is removed takes its records along: its number may come again. Pure; knows places, never bytes.
"""

from collections.abc import Collection, Iterable

from services.kvstore.domain.disk_index import DiskRecord

Place = tuple[int, int]  # segment and offset


class UnerasedRecords:
    """By the salt whose erasure, or loss of a block, they are of."""

    def __init__(self) -> None:
        """Nothing is left."""
        self._salts: dict[bytes, dict[Place, DiskRecord]] = {}

    def add(self, salt: bytes, records: Iterable[DiskRecord]) -> None:
        """They are to be overwritten. Idempotent."""
        added = {(record.segment, record.offset): record for record in records}
        if added:
            self._salts.setdefault(salt, {}).update(added)

    def of(self, salt: bytes) -> tuple[DiskRecord, ...]:
        """What is left of a salt."""
        return tuple(self._salts.get(salt, {}).values())

    def done(self, salt: bytes) -> None:
        """All of it has been overwritten. Idempotent."""
        self._salts.pop(salt, None)

    def keep(self, segments: Collection[int]) -> None:
        """Only these segments are there. O(records left), which is nearly always 0."""
        for salt, records in tuple(self._salts.items()):
            self._salts[salt] = {place: record for place, record in records.items() if place[0] in segments}
            if not self._salts[salt]:
                del self._salts[salt]

    def salts(self) -> tuple[bytes, ...]:
        """Of which something is left."""
        return tuple(self._salts)

    def usage(self, salt: bytes) -> tuple[int, int]:
        """Blocks left of a salt, and the bytes they take."""
        records = self._salts.get(salt, {}).values()
        return len(records), sum(record.span for record in records)

"""An append-only log of usage events in segment files: whole records or none, and damage costs only what it touches.

    segment  events-00000001.log, events-00000002.log, …
    record   | magic "RHU1" | length, 4 bytes | CRC-32 of the payload, 4 bytes | payload |     (little-endian)

A record is written by one `write`, so that a killed process leaves it in the page cache whole, or cut at the end of the
last segment. Reading tells bytes that are no record apart and goes on at the next magic; whoever reads keeps them.
A segment is deleted when all of its events were acknowledged. Acknowledgements themselves are not written: what was
acknowledged in a segment that still exists is read again, and harmless, because an event's id counts once.

No thread safety: one owner, who holds the folder's lock.
"""

import errno
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

MAGIC: Final = b"RHU1"
_HEADER: Final = struct.Struct("<4sII")
SEGMENT_BYTES: Final = 4 * 1024 * 1024  # about 8,000 events: few files, and little to read again after a kill
RECORD_BYTES_MAX: Final = 1024 * 1024  # a guess, far above any event: a length beyond it is damage
_PATTERN: Final = "events-*.log"


@dataclass(frozen=True, slots=True)
class Record:
    """One event as it was kept."""

    segment: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that are no record. `torn`: they are the end of the last segment, as a kill leaves them."""

    segment: int
    data: bytes
    torn: bool


def parse(data: bytes, segment: int, *, is_last: bool) -> Iterator[Record | Damage]:
    """What a segment holds, in order. O(n)."""
    at, end = 0, len(data)
    while at < end:
        payload_end = _payload_end(data, at)
        if payload_end is not None:
            yield Record(segment, data[at + _HEADER.size : payload_end])
            at = payload_end
            continue
        following = data.find(MAGIC, at + 1)
        stop = end if following == -1 else following
        yield Damage(segment, data[at:stop], torn=is_last and stop == end and _is_cut(data, at))
        at = stop


def _is_cut(data: bytes, at: int) -> bool:
    """Whether a record that begins at `at` would be longer than what is there."""
    if len(data) - at < _HEADER.size:
        return True
    _, length, _ = _HEADER.unpack_from(data, at)
    return bool(at + _HEADER.size + length > len(data))


def _payload_end(data: bytes, at: int) -> int | None:
    """Where the record that begins at `at` ends; None if none does."""
    if len(data) - at < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack_from(data, at)
    end: int = at + _HEADER.size + length
    if magic != MAGIC or length > RECORD_BYTES_MAX or end > len(data):
        return None
    return end if zlib.crc32(data[at + _HEADER.size : end]) == checksum else None


class EventLog:
    """See the module. Every method may raise OSError; after it nothing half-written is left."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._held: dict[int, int] = {}  # segment → events that were not acknowledged
        self._segment = max(self._numbers(), default=0)
        self._handle = -1
        self._full: list[int] = []  # handles of full segments that were not synced yet
        self._size = 0

    def read(self) -> list[Record | Damage]:
        """Everything that is there, oldest first, and count its events as held. Call once, before appending."""
        found: list[Record | Damage] = []
        numbers = self._numbers()
        for number in numbers:
            found += parse(self._path(number).read_bytes(), number, is_last=number == numbers[-1])
        for number in numbers:
            self._held[number] = sum(isinstance(each, Record) and each.segment == number for each in found)
        return found

    def forget_damage(self, found: Sequence[Record | Damage]) -> None:
        """What `read` found is safe elsewhere: cut a torn end, delete segments without events."""
        if found and isinstance(found[-1], Damage) and found[-1].torn:
            self._cut(found[-1].segment, len(found[-1].data))
        for number in [number for number, events in self._held.items() if not events]:
            self._drop(number)

    def append(self, payload: bytes) -> int:
        """Keep one event; returns its segment, for `acknowledge`. A killed process does not lose it."""
        if self._handle < 0 or self._size >= self._segment_bytes:
            self._rotate()
        record = _HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.write(self._handle, record)
            if written != len(record):  # the disk filled up in the middle
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += written
        self._held[self._segment] = self._held.get(self._segment, 0) + 1
        return self._segment

    def acknowledge(self, segment: int) -> None:
        """One event of a segment is not needed any more."""
        left = self._held.get(segment, 0) - 1
        assert left >= 0, "an event is acknowledged once"
        self._held[segment] = left
        if left == 0 and (segment != self._segment or self._handle < 0):
            self._drop(segment)

    def syncing(self) -> Callable[[], None]:
        """What brings everything appended so far to the disk itself, against a power cut. Blocks; run it in a thread.

        It has handles of its own, so that appending goes on meanwhile. Call it once."""
        handles, self._full = self._full, []
        if self._handle >= 0:
            handles.append(os.dup(self._handle))
        return partial(_sync_and_close, handles)

    def trim(self) -> None:
        """Empty the segment that is being written if nothing of it is held."""
        if self._size and not self._held.get(self._segment, 0):
            os.ftruncate(self._handle, 0)
            self._size = 0

    @property
    def bytes_held(self) -> int:
        """Size of the segment that is being written; the others are older and full."""
        return self._size + self._segment_bytes * max(0, len(self._held) - 1)

    def close(self) -> None:
        """Sync and close. Idempotent."""
        self.syncing()()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Delete every segment: another log has their events."""
        self.close()
        for number in self._numbers():
            self._drop(number)

    def _rotate(self) -> None:
        previous = self._segment
        handle = os.open(self._path(previous + 1), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._handle >= 0:
            self._full.append(self._handle)
        self._handle, self._segment, self._size = handle, previous + 1, 0
        if previous in self._held and not self._held[previous]:
            self._drop(previous)

    def _cut(self, number: int, torn_bytes: int) -> None:
        path = self._path(number)
        os.truncate(path, path.stat().st_size - torn_bytes)

    def _drop(self, number: int) -> None:
        self._held.pop(number, None)
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"events-{number:08d}.log"

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("events-")) for path in self._folder.glob(_PATTERN))


def _sync_and_close(handles: list[int]) -> None:
    try:
        for handle in handles:
            os.fdatasync(handle)
    finally:
        for handle in handles:
            os.close(handle)

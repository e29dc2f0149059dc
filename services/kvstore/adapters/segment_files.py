"""Blocks in append-only segment files, read and written past the page cache where the file system can.

```
segment   | record | record | record | ...               one file, <number>.segment
record    | header, one page | the block's bytes, to whole pages |
header    see `segment_header`
```

Pages make every read and write fit for O_DIRECT, so a block goes from the disk into its slot without a copy; with keys
it is encrypted on the way. A scan believes a header only if it was made for this file and this place, so that no bytes
of a block can pose as one; it cuts a file at the first header it does not believe. Who reads the bytes checks them.
Nothing is synced but an erasure: what a power cut takes is a miss. Every fault is a `DiskFault`. Calls block; `append`,
`destroy` and `remove` come from one thread at a time, `read_into` from any. Decision: docs/decisions/0054-disk-tier.md.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from services.kvstore.adapters.segment_header import ALIVE, DEAD, PAGE, header_page, padded, parsed, span_of
from services.kvstore.adapters.tenant_keys import TAG_BYTES, TenantKeys
from services.kvstore.domain.disk_index import DiskRecord
from services.kvstore.ports import DiskFault

log = structlog.get_logger(__name__)


class SegmentFiles:
    """`BlockLog` over files in one folder, which belongs to this process alone (checked by a lock)."""

    def __init__(
        self, folder: Path, segment_bytes: int, *, direct: bool = True, keys: TenantKeys | None = None
    ) -> None:
        """Makes the folder; encrypts if there are `keys`. Raises DiskFault."""
        self._folder = folder
        self._keys = keys
        self._segment_bytes = segment_bytes
        self._files: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._writing = -1
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct and _direct_works(folder) else 0)
            self._lock = _locked(folder)
        except OSError as error:
            raise DiskFault(f"the folder of the blocks cannot be used: {error.strerror}") from error

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return bool(self._flags & os.O_DIRECT)

    @property
    def writing(self) -> int:
        """The segment being appended to; -1 before the first."""
        return self._writing

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of the files."""
        return tuple(self._files)

    @property
    def bytes_held(self) -> int:
        """Length of all files."""
        return sum(self._ends.values())

    def needs_segment(self, length: int) -> bool:
        """Whether a block of `length` starts a new segment."""
        return self._writing < 0 or self._ends[self._writing] + span_of(length) > self._segment_bytes

    def fits(self, length: int) -> bool:
        """Whether a segment can hold such a block at all."""
        return span_of(length) <= self._segment_bytes

    def scan(self) -> Iterator[DiskRecord]:
        """Every living record of every file; cuts torn tails. Files that cannot be read are removed."""
        for path in sorted(self._folder.glob("*.segment")):
            if not path.stem.isdecimal():
                continue
            number = int(path.stem)
            try:
                self._files[number] = os.open(path, self._flags)
                yield from self._scan_file(number)
            except OSError as error:
                log.warning("segment_unreadable", segment=number, text=error.strerror)
                with suppress(DiskFault):
                    self.remove(number)
        self._writing = max(self._files, default=-1)

    def append(self, record: DiskRecord, data: memoryview) -> DiskRecord:
        """Write a block at the end; returns the record with its place. `data` may be longer than the block."""
        span = span_of(record.length)
        try:
            if self.needs_segment(record.length):
                self._open_next()
            number, offset = self._writing, self._ends[self._writing]
            placed = replace(record, segment=number, offset=offset, span=span)
            placed, body = self._body(placed, data)
            written = os.pwritev(self._files[number], [header_page(placed, ALIVE, self._keys), body], offset)
            if written != span:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._cut_rest()
            raise DiskFault(f"a block could not be written: {error.strerror}") from error
        self._ends[number] = offset + span
        return placed

    def read_into(self, record: DiskRecord, into: memoryview) -> None:
        """Read a block to the start of `into`, which is changed up to its end. The bytes are not checked."""
        descriptor = self._files.get(record.segment)
        if descriptor is None:
            raise DiskFault("the segment has been removed")
        wanted, start = padded(record.length), record.offset + PAGE
        try:
            if self._keys is None and len(into) >= wanted and _is_aligned(into):
                got = os.preadv(descriptor, [into[:wanted]], start)
            else:
                got = self._read_around(descriptor, record, into)
        except OSError as error:
            raise DiskFault(f"a block could not be read: {error.strerror}") from error
        if got < record.length:
            raise DiskFault("a block ends too early")

    def forget(self, salt: bytes) -> None:
        """Destroy the salt's key, if blocks are encrypted. Idempotent. Raises DiskFault."""
        if self._keys is not None:
            self._keys.forget(salt)

    def _body(self, record: DiskRecord, data: memoryview) -> tuple[DiskRecord, memoryview]:
        """Whole aligned pages with the block's bytes, encrypted if there are keys, and the record that tells how."""
        length, pages = record.length, padded(record.length)
        if self._keys is not None:
            room = memoryview(mmap.mmap(-1, pages + PAGE))
            seal = self._keys.seal(record.salt, record.key, data[:length], room[: length + TAG_BYTES])
            room[length : length + TAG_BYTES] = bytes(TAG_BYTES)
            return replace(record, seal=seal), room[:pages]
        body = data[:pages]
        if len(body) < pages or not _is_aligned(body):
            body = _aligned_copy(data[:length])
        return record, body

    def _read_around(self, descriptor: int, record: DiskRecord, into: memoryview) -> int:
        """Read into pages of our own first: to decrypt, or because `into` is not aligned."""
        length, wanted = record.length, padded(record.length)
        room = memoryview(mmap.mmap(-1, wanted + PAGE))
        got = os.preadv(descriptor, [room[:wanted]], record.offset + PAGE)
        if self._keys is None:
            into[:length] = room[:length]
        elif got >= length:
            sealed, target = room[: length + TAG_BYTES], into[:length]
            self._keys.unseal(record.salt, record.key, record.seal, sealed, target)
        return got

    def destroy(self, records: tuple[DiskRecord, ...]) -> None:
        """Overwrite blocks with zeros, headers first, and sync. A segment that refuses is removed. Raises DiskFault."""
        touched = {record.segment for record in records if record.segment in self._files}
        refused: set[int] = set()
        for record in records:
            if record.segment not in self._files:
                continue
            try:
                zeros = _aligned_copy(bytes(record.length))
                os.pwritev(self._files[record.segment], [header_page(record, DEAD, self._keys), zeros], record.offset)
            except OSError:
                refused.add(record.segment)
        for number in touched - refused:
            try:
                os.fdatasync(self._files[number])
            except OSError:
                refused.add(number)
        for number in refused:
            self.remove(number)

    def remove(self, number: int) -> None:
        """Remove a whole segment. Idempotent. Raises DiskFault."""
        if number == self._writing:
            self._writing = -1
        try:
            (self._folder / f"{number:08d}.segment").unlink(missing_ok=True)
        except OSError as error:  # it stays known, so that it can be asked for again
            raise DiskFault(f"a segment could not be removed: {error.strerror}") from error
        descriptor = self._files.pop(number, None)
        self._ends.pop(number, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close the files; they stay."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        os.close(self._lock)

    def _cut_rest(self) -> None:
        """What was written of a block that does not fit belongs to no block, and no erasure would find it."""
        if self._writing in self._files:
            with suppress(OSError):
                os.ftruncate(self._files[self._writing], self._ends[self._writing])

    def _open_next(self) -> None:
        number = max(self._files, default=-1) + 1
        path = self._folder / f"{number:08d}.segment"
        self._files[number] = os.open(path, self._flags | os.O_CREAT | os.O_EXCL, 0o600)
        self._ends[number] = 0
        self._writing = number

    def _scan_file(self, number: int) -> Iterator[DiskRecord]:
        descriptor = self._files[number]
        end, offset = os.fstat(descriptor).st_size, 0
        self._ends[number] = 0
        with mmap.mmap(-1, PAGE) as page:
            while offset + PAGE <= end:
                os.preadv(descriptor, [page], offset)
                found = parsed(page[:], number, offset, self._keys)
                if found is None or offset + found[0].span > end:
                    break
                record, state = found
                offset += record.span
                if state == ALIVE:
                    yield record
        if offset < end:
            log.warning("segment_cut", segment=number, bytes_cut=end - offset)
            os.ftruncate(descriptor, offset)
        self._ends[number] = offset


def _is_aligned(view: memoryview) -> bool:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0


def _aligned_copy(data: memoryview | bytes) -> memoryview:
    copy = mmap.mmap(-1, padded(len(data)))
    copy[: len(data)] = data
    return memoryview(copy)


def _direct_works(folder: Path) -> bool:
    """Whether the file system takes O_DIRECT, by trying."""
    path = folder / "direct.probe"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with mmap.mmap(-1, PAGE) as page:
                return os.pwritev(descriptor, [page], 0) == PAGE
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor

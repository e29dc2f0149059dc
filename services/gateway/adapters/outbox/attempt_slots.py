"""Where every running attempt stands, in a shared memory map that outlives a killed process.

A stream's token counts change with every piece. Writing each to a file would cost a system call; here it is one or two
stores of eight aligned bytes into a page of the page cache, which the kernel keeps when the process is killed at any
instruction. So a restarted gateway knows to the token what had been taken from the engine (invariant 13).

    slot, 1 KiB  | state | output | input << 32 | cached | template length << 32 | CRC-32 | template … |
                   8       8        8                      8

The template is the usage event of the attempt if it ended now, without its counts. State is stored last when a slot is
taken and first when it is given back, so a slot that says "open" has a whole template; a power cut may still have torn
it, and then its CRC does not fit. Slot 0 holds no attempt: its second word is when this process was last seen alive.
"""

import mmap
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SLOT_BYTES: Final = 1024
SLOTS: Final = 8192  # attempts of one gateway at once; more are recovered from the scheduler's last heartbeat only
_WORDS: Final = SLOT_BYTES // 8
_TEMPLATE_AT: Final = 32
TEMPLATE_BYTES_MAX: Final = SLOT_BYTES - _TEMPLATE_AT
_STATE, _OUTPUT, _INPUT, _TEMPLATE = range(4)
_FREE, _OPEN = 0, 1
_ALIVE_WORD: Final = 1
_LOW: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """An attempt that had not ended when its process did. `template` None: it cannot be read any more."""

    number: int
    template: bytes | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class SlotJournal:
    """The counts of one attempt. Cheap enough for every piece of a stream: well under a microsecond."""

    __slots__ = ("_at", "_input", "_words", "number")

    def __init__(self, words: "memoryview[int]", number: int) -> None:
        self.number = number
        self._words = words
        self._at = number * _WORDS
        self._input = 0

    def note(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """So much was taken from the engine. Each word is stored whole."""
        both = input_tokens << 32 | cached_tokens
        if both != self._input:
            self._input = both
            self._words[self._at + _INPUT] = both
        self._words[self._at + _OUTPUT] = output_tokens


class AttemptSlots:
    """See the module. One owner, who holds the folder's lock."""

    def __init__(self, path: Path, *, slots: int = SLOTS) -> None:
        """Open or make the table. Raises OSError, also when the disk has no room for all of it."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = max(os.fstat(handle).st_size // SLOT_BYTES, slots + 1) * SLOT_BYTES
            os.posix_fallocate(handle, 0, size)  # a full disk would otherwise end the process when a page is touched
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self._bytes = memoryview(self._map)
        self._words: memoryview[int] = self._bytes.cast("Q")
        self._free = [number for number in range(size // SLOT_BYTES - 1, 0, -1) if not self._state(number)]

    def take(self, template: bytes) -> SlotJournal | None:
        """A slot for an attempt that begins; None if all are taken or the template is too long."""
        if not self._free or len(template) > TEMPLATE_BYTES_MAX:
            return None
        number = self._free.pop()
        start = number * SLOT_BYTES + _TEMPLATE_AT
        self._bytes[start : start + len(template)] = template
        at = number * _WORDS
        self._words[at + _TEMPLATE] = len(template) << 32 | zlib.crc32(template)
        self._words[at + _OUTPUT] = 0
        self._words[at + _INPUT] = 0
        self._words[at + _STATE] = _OPEN
        return SlotJournal(self._words, number)

    def give_back(self, number: int) -> None:
        """The attempt's event is kept elsewhere."""
        self._words[number * _WORDS + _STATE] = _FREE
        self._free.append(number)

    def open_slots(self) -> Iterator[OpenSlot]:
        """What an earlier process left. O(slots)."""
        for number in range(1, len(self._words) // _WORDS):
            if self._state(number):
                at = number * _WORDS
                both = self._words[at + _INPUT]
                yield OpenSlot(number, self._template(number), both >> 32, both & _LOW, self._words[at + _OUTPUT])

    @property
    def alive_ms(self) -> int:
        """When the owner last said that it lives, Unix time; 0 = never."""
        return self._words[_ALIVE_WORD]

    @alive_ms.setter
    def alive_ms(self, now_ms: int) -> None:
        self._words[_ALIVE_WORD] = now_ms

    def _state(self, number: int) -> int:
        return self._words[number * _WORDS + _STATE]

    def _template(self, number: int) -> bytes | None:
        word = self._words[number * _WORDS + _TEMPLATE]
        length, start = word >> 32, number * SLOT_BYTES + _TEMPLATE_AT
        if length > TEMPLATE_BYTES_MAX:
            return None
        template = bytes(self._bytes[start : start + length])
        return template if zlib.crc32(template) == word & _LOW else None

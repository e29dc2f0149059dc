"""Copies bytes and computes the XXH3-64 of what it copied, in one pass where this machine can.

A block is looked at by its writer and by its reader (docs/decisions/0057). As a copy and then a hash that costs a fifth
to a third more than the copy; `checked_copy.c` does both at once, around the caches, and is faster than a plain copy
(docs/decisions/0153). It is built when the package is installed, if there is a C compiler; without it, and on
processors without AVX2, NumPy and xxhash do the same in two passes. Both give the same bytes and the same checksum:
what is loaded here is compared with xxhash before it is used. Many blocks go in one call: between two calls the
interpreter is given up and taken again, which is a wait where another thread talks to the store
(docs/decisions/0163).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from engines.checked_copy.build import LIBRARY

Bytes = NDArray[np.uint8]
_SHORT_MAX = 240  # the hash treats these differently, and nobody copies them often
_TRIED_LENGTHS = (241, 1024, 1025, 4097)  # one stripe short of, at, and after a block of the hash; several blocks


class CopiesOf(Protocol):
    """Copies blocks of one length between `memory`, at `offsets`, and arrays of their own.

    Into `memory`, or out of it if `outward`. The checksums of what was copied, in order. Other threads run meanwhile.
    Raises ValueError, before anything is copied, if lengths differ, an offset is outside of `memory`, or a target
    cannot be written. Blocks and their places do not overlap."""

    def __call__(
        self, memory: Bytes, offsets: Sequence[int], blocks: Sequence[Bytes], *, outward: bool = False
    ) -> list[int]:
        """See the class."""
        ...


def two_passes(memory: Bytes, offsets: Sequence[int], blocks: Sequence[Bytes], *, outward: bool = False) -> list[int]:
    """Copy, then hash the source, so that bytes which were wrong when they were copied are seen to be wrong."""
    length = _length_of(memory, offsets, blocks, outward)
    sums: list[int] = []
    for offset, block in zip(offsets, blocks, strict=True):
        place = memory[offset : offset + length]
        target, source = (block, place) if outward else (place, block)
        target[:] = source
        sums.append(xxhash.xxh3_64_intdigest(np.ascontiguousarray(source).data))
    return sums


def one_pass(library: Path) -> CopiesOf | None:
    """The compiled copy in `library`; None if there is none, or it does not do here what it should."""
    try:
        loaded = ctypes.CDLL(str(library))  # releases the interpreter during each call
        works, function = loaded.roundhouse_checked_copy_works, loaded.roundhouse_checked_copies
    except (OSError, AttributeError):  # not built, or for another machine
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = None

    def copies(memory: Bytes, offsets: Sequence[int], blocks: Sequence[Bytes], *, outward: bool = False) -> list[int]:
        length = _length_of(memory, offsets, blocks, outward)
        if length <= _SHORT_MAX:
            return two_passes(memory, offsets, blocks, outward=outward)
        try:
            beside = np.array([_address(block) for block in blocks], np.uint64)
            within = np.array(offsets, np.uint64) + np.uint64(_address(memory))
        except TypeError:  # one of them cannot be written, or does not lie together
            return two_passes(memory, offsets, blocks, outward=outward)
        sums = np.empty(len(blocks), np.uint64)
        to, start = (beside, within) if outward else (within, beside)
        function(to.ctypes.data, start.ctypes.data, len(blocks), length, sums.ctypes.data)
        found: list[int] = sums.tolist()
        return found

    return copies if works() and _is_right(copies) else None


def _length_of(memory: Bytes, offsets: Sequence[int], blocks: Sequence[Bytes], outward: bool) -> int:
    """Of each block. Raises ValueError if anything does not fit, or a target is sealed."""
    if len(offsets) != len(blocks) or len(set(map(len, blocks))) > 1:
        raise ValueError("what is copied fits exactly")
    length = len(blocks[0]) if blocks else 0
    if blocks and (min(offsets) < 0 or max(offsets) + length > len(memory)):
        raise ValueError("a block outside of the memory")
    if not all(target.flags.writeable for target in (blocks if outward else (memory,))):
        raise ValueError("a target that cannot be written")
    return length


def _address(array: Bytes) -> int:
    """A fifth of the time of `array.ctypes.data`. Raises TypeError if it is sealed or does not lie together."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def _is_right(copies: CopiesOf) -> bool:
    for length in _TRIED_LENGTHS:
        source = (np.arange(2 * length) * 37 % 251).astype(np.uint8)
        blocks = [source[:length], source[length:]]
        memory = np.zeros(3 * length, np.uint8)
        sums = copies(memory, [2 * length, 0], blocks)
        right = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
        if sums != right or not np.array_equal(memory[2 * length :], blocks[0]):
            return False
        if not np.array_equal(memory[:length], blocks[1]):
            return False
    return True


_compiled = one_pass(LIBRARY)
IN_ONE_PASS = _compiled is not None
"""Whether this process has the compiled copy."""

checked_copies: CopiesOf = _compiled or two_passes
"""The best that this process has."""

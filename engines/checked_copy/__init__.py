"""Copies bytes and computes the XXH3-64 of what it copied, in one pass where this machine can.

A block is looked at by its writer and by its reader (docs/decisions/0057). As a copy and then a hash that costs a fifth
to a third more than the copy; `checked_copy.c` does both at once, around the caches, and is faster than a plain copy
(docs/decisions/0153). It is built when the package is installed, if there is a C compiler; without it, and on
processors without AVX2, NumPy and xxhash do the same in two passes. Both give the same bytes and the same checksum:
what is loaded here is compared with xxhash before it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from engines.checked_copy.build import LIBRARY

Bytes = NDArray[np.uint8]
CopyOf = Callable[[Bytes, Bytes], int]

_SHORT_MAX = 240  # the hash treats these differently, and nobody copies them often
_TRIED_LENGTHS = (241, 1024, 1025, 4097)  # one stripe short of, at, and after a block of the hash; several blocks


def two_passes(target: Bytes, source: Bytes) -> int:
    """Copy, then hash the source, so that bytes which were wrong when they were copied are seen to be wrong."""
    target[:] = source
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(source).data)


def one_pass(library: Path) -> CopyOf | None:
    """The compiled copy in `library`; None if there is none, or it does not do here what it should."""
    try:
        loaded = ctypes.CDLL(str(library))  # releases the interpreter during each call
        works, function = loaded.roundhouse_checked_copy_works, loaded.roundhouse_checked_copy
    except (OSError, AttributeError):  # not built, or for another machine
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint64

    def copy(target: Bytes, source: Bytes) -> int:
        length = len(source)
        if length != len(target):
            raise ValueError("what is copied fits exactly")
        if length <= _SHORT_MAX:
            return two_passes(target, source)
        try:
            to = ctypes.addressof(ctypes.c_char.from_buffer(target.data))  # a fifth of the time of `target.ctypes.data`
            start = ctypes.addressof(ctypes.c_char.from_buffer(source.data))
        except TypeError:  # one of them cannot be written, or does not lie together
            return two_passes(target, source)
        checksum: int = function(to, start, length)
        return checksum

    return copy if works() and _is_right(copy) else None


def _is_right(copy: CopyOf) -> bool:
    for length in _TRIED_LENGTHS:
        source = (np.arange(length) * 37 % 251).astype(np.uint8)
        target = np.zeros(length, np.uint8)
        if copy(target, source) != xxhash.xxh3_64_intdigest(source.data) or not np.array_equal(target, source):
            return False
    return True


_compiled = one_pass(LIBRARY)
IN_ONE_PASS = _compiled is not None
"""Whether this process has the compiled copy."""

checked_copy: CopyOf = _compiled or two_passes
"""`(target, source) -> checksum`: arrays of bytes of one length, which do not overlap. Raises ValueError if they differ
in length or the target cannot be written. Other threads run meanwhile."""

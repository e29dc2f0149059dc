"""Byte sizes as people write them: `160MiB`, `2GB`, `65536`."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `160MiB`. Raises ValueError with what is allowed."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size: write a number with B, KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_bytes(count: int) -> str:
    """A size with a binary unit: `160 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}".replace(".0 ", " ")
    return f"{count} B"

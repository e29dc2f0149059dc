"""Reads safetensors files that the loader keeps in shared memory: the tensors are views of the map, nothing is copied.

The loader has verified the bytes and keeps the range for as long as this model is loaded. float16 and bfloat16 are
widened, as from a file; float32 tensors stay where they are, read-only.
Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data).
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.reference.model_config import CheckpointError

Array = NDArray[np.float32]

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_TYPES: dict[str, tuple[str, int]] = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<u2", 2)}


@dataclass(frozen=True, slots=True)
class MappedFiles:
    """Where files of the checkpoint lie in one file of shared memory: `(offset, bytes)` by name."""

    path: str = ""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)


NOTHING_MAPPED = MappedFiles()


def parse_mapped_files(text: str) -> MappedFiles:
    """The parameter `weights_arena`; empty text is no file. Raises CheckpointError.

    An arena that this process does not see (another container, without that folder) is as none: the checkpoint folder
    has the same bytes."""
    if not text:
        return NOTHING_MAPPED
    try:
        given = json.loads(text)
        files = {str(name): (int(offset), int(size)) for name, (offset, size) in given["files"].items()}
        path = str(given["path"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"weights_arena: {error!r}") from error
    return MappedFiles(path, files) if os.path.exists(path) else NOTHING_MAPPED


def read_mapped(mapped: MappedFiles, name: str) -> dict[str, Array]:
    """The tensors of one mapped safetensors file by name; raises CheckpointError."""
    offset, size = mapped.files[name]
    try:
        descriptor = os.open(mapped.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: the host arena cannot be mapped: {error}") from error
    return {key: _tensor(memory, name, key, entry) for key, entry in _header(memory, name).items()}


def _header(memory: mmap.mmap, name: str) -> dict[str, dict[str, Any]]:
    """Entries with absolute offsets, checked to lie within the file."""
    length = int.from_bytes(memory[:8], "little")
    if not 2 <= length <= min(HEADER_BYTES_MAX, len(memory) - 8):
        raise CheckpointError(f"{name}: not a safetensors file")
    try:
        header = json.loads(memory[8 : 8 + length])
        entries = {key: dict(entry) for key, entry in header.items() if key != "__metadata__"}
        for entry in entries.values():
            begin, end = entry["data_offsets"]
            shape = [int(each) for each in entry["shape"]]
            _, width = _TYPES.get(entry["dtype"], ("", 0))
            if width and not (
                0 <= begin <= end <= len(memory) - 8 - length and end - begin == width * math.prod(shape)
            ):
                raise ValueError("a tensor lies outside the file")
            entry.update(begin=8 + length + begin, shape=shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name}: not a safetensors file: {error}") from error
    return entries


def _tensor(memory: mmap.mmap, name: str, key: str, entry: Mapping[str, Any]) -> Array:
    if entry["dtype"] not in _TYPES:
        raise CheckpointError(f"{name}: {key} is {entry['dtype']}, only F32, F16 and BF16 are supported")
    kind, _ = _TYPES[entry["dtype"]]
    flat = np.frombuffer(memory, dtype=kind, count=math.prod(entry["shape"]), offset=entry["begin"])
    shaped: NDArray[Any] = flat.reshape(entry["shape"])
    if kind == "<f4":
        return shaped
    if kind == "<f2":
        return shaped.astype(np.float32)
    widened: NDArray[np.uint32] = shaped.astype(np.uint32) << np.uint32(16)
    return widened.view(np.float32)

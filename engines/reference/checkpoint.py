"""Reads the tensors of a Hugging Face checkpoint folder into float32 arrays.

Single file (`model.safetensors`) or shards with `model.safetensors.index.json`; float32, float16 and bfloat16.
It does not check content digests: the loader has done that before the folder gets its final name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors
from numpy.typing import NDArray

from engines.reference.mapped_weights import NOTHING_MAPPED, MappedFiles, read_mapped
from engines.reference.model_config import CheckpointError

Array = NDArray[np.float32]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def _from_bfloat16(data: bytes) -> Array:
    """bfloat16 is the upper half of a float32."""
    widened: NDArray[np.uint32] = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    return widened.view(np.float32)


_DECODERS: dict[str, Callable[[bytes], Array]] = {
    "F32": lambda data: np.frombuffer(data, dtype="<f4"),
    "F16": lambda data: np.frombuffer(data, dtype="<f2").astype(np.float32),
    "BF16": _from_bfloat16,
}


def load_tensors(folder: Path, mapped: MappedFiles = NOTHING_MAPPED) -> dict[str, Array]:
    """Every tensor of the checkpoint by name, as float32; raises `CheckpointError` naming the file at fault.

    Files that are `mapped` are read from shared memory, the others from the folder."""
    tensors: dict[str, Array] = {}
    for path in _shard_paths(folder):
        tensors.update(read_mapped(mapped, path.name) if path.name in mapped.files else read_safetensors(path))
    return tensors


def read_safetensors(path: Path) -> dict[str, Array]:
    """The tensors of one safetensors file as float32; raises `CheckpointError`."""
    try:
        entries = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: no such file in {path.parent}") from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path.name}: not a safetensors file: {error}") from error
    return dict(_decode(path, name, entry) for name, entry in entries)


def _decode(path: Path, name: str, entry: dict[str, object]) -> tuple[str, Array]:
    decoder = _DECODERS.get(str(entry["dtype"]))
    if decoder is None:
        raise CheckpointError(f"{path.name}: {name} is {entry['dtype']}, only F32, F16 and BF16 are supported")
    data, shape = entry["data"], entry["shape"]
    assert isinstance(data, bytes | bytearray)  # the library's contract
    assert isinstance(shape, list)
    return name, decoder(bytes(data)).reshape(shape)


def _shard_paths(folder: Path) -> Iterator[Path]:
    index = folder / INDEX_NAME
    if not index.exists():
        yield folder / SINGLE_NAME
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{INDEX_NAME}: not a shard index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{INDEX_NAME}: shard {name!r} is outside the folder")
        yield folder / name

"""How much device memory one instance of a model takes, from the headers of its files.

An estimate made once, when a model is declared with `device: auto`; the loader's ledger counts with it. It reads
headers, never weights. Formats: the safetensors README (8 bytes little-endian length, then JSON), and config.json of
Hugging Face.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from roundhouse.catalogue.base_shape import adapter_slot_bytes, base_shape
from roundhouse.catalogue.digests import version_files
from roundhouse.catalogue.lora_format import vllm_rank
from roundhouse.catalogue.records import Engine
from roundhouse.errors import InvalidInput, NotFound

WORKSPACE_BYTES = 4 * 1024 * 1024  # activations of one step of a small model; a guess
HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library itself
_ELEMENT_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_COMPUTE_BYTES = {Engine.REFERENCE: 4}  # NumPy computes in float32; other engines keep what is stored
_KV_ELEMENT_BYTES = {Engine.REFERENCE: 4, Engine.VLLM: 2}


@dataclass(frozen=True, slots=True)
class SizedVersion:
    """What a size depends on."""

    path: Path
    engine: Engine
    kv_pool_tokens: int
    adapter_slots: int = 0
    adapter_rank_max: int = 16


SizeEstimator = Callable[[SizedVersion], int]
"""Device bytes of one instance. Raises InvalidInput or NotFound for files it cannot read. May block."""


def device_bytes(version: SizedVersion) -> int:
    """Weights as the engine keeps them + KV pool + workspace. Raises InvalidInput, NotFound."""
    if version.engine in (Engine.REFERENCE, Engine.VLLM):
        weights = sum(_weight_bytes(file, version.engine) for _, file in _safetensors(version.path))
        pool = version.kv_pool_tokens * kv_bytes_per_token(version.path, version.engine)
        return weights + pool + _adapter_bytes(version) + WORKSPACE_BYTES
    return sum(file.stat().st_size for _, file in version_files(version.path)) + WORKSPACE_BYTES


def _adapter_bytes(version: SizedVersion) -> int:
    if version.engine is not Engine.VLLM or not version.adapter_slots:
        return 0
    shape = base_shape(model_config(version.path))
    return adapter_slot_bytes(shape, version.adapter_slots, vllm_rank(version.adapter_rank_max))


def model_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises InvalidInput, NotFound."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{file} must be a map with keys")
    return config


def context_tokens(folder: Path) -> int:
    """The longest prompt + output that a checkpoint's positions allow. Raises InvalidInput, NotFound."""
    return _whole(model_config(folder), "max_position_embeddings", folder)


def kv_bytes_per_token(folder: Path, engine: Engine) -> int:
    """Keys and values of one token in all layers. Raises InvalidInput, NotFound."""
    config = model_config(folder)
    heads = _whole(config, "num_attention_heads", folder)
    kv_heads = _whole(config, "num_key_value_heads", folder) if config.get("num_key_value_heads") else heads
    if config.get("head_dim"):
        head_size = _whole(config, "head_dim", folder)
    else:
        head_size = _whole(config, "hidden_size", folder) // heads
    return 2 * _whole(config, "num_hidden_layers", folder) * kv_heads * head_size * _KV_ELEMENT_BYTES[engine]


def _whole(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(f"{folder / 'config.json'} has no usable `{key}`")
    return value


def _safetensors(path: Path) -> list[tuple[str, Path]]:
    files = [(name, file) for name, file in version_files(path) if name.endswith(".safetensors")]
    if not files:
        raise InvalidInput(f"there are no safetensors files in {path}")
    return files


def _weight_bytes(file: Path, engine: Engine) -> int:
    compute_bytes = _COMPUTE_BYTES.get(engine)
    total = 0
    for name, tensor in safetensors_header(file).items():
        if name == "__metadata__":
            continue
        try:
            elements, stored = prod(tensor["shape"]), _ELEMENT_BYTES.get(tensor["dtype"], 1)
        except (TypeError, KeyError) as error:
            raise InvalidInput(f"{file} is not a safetensors file: tensor {name!r} has no shape") from error
        total += elements * (compute_bytes or stored)
    return total


def safetensors_header(file: Path) -> dict[str, Any]:
    """Names, types and shapes of the tensors. Raises InvalidInput, NotFound."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(HEADER_BYTES_MAX, file.stat().st_size - 8):
                raise InvalidInput(f"{file} is not a safetensors file: it is cut short or its header is")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise InvalidInput(f"{file} is not a safetensors file: its header is not a map")
    return header

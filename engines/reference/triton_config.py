"""Triton package of the reference engine. Imports neither NumPy nor the engine: the loader runs this."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from engines.language_tensors import language_inputs, language_outputs
from engines.packaging import EngineSpec, PackagingError, TritonPackage, model_shim, string_parameters
from engines.placement import hold_process

# Measured: resident memory of the model's process is 46 to 50 MiB before weights, libraries that it shares included.
PROCESS_BYTES = 48 * 2**20

# Guess with room: activations of a 128-token chunk and its attention scores, in units of hidden + intermediate floats.
WORKSPACE_ROWS = 4096


def reference_package(spec: EngineSpec) -> TritonPackage:
    """Configuration and shim; raises `PackagingError` when the folder is no checkpoint."""
    if not (Path(spec.weights_path) / "config.json").is_file():
        raise PackagingError(f"{spec.weights_path}: no config.json, so not a Hugging Face checkpoint")
    config: dict[str, object] = {
        "name": spec.triton_model_name,
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": language_inputs(),
        "output": language_outputs(),
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": string_parameters(spec),
    }
    files = {"file:1/model.py": model_shim("engines.reference.triton_model")}
    hold_process(config, files, spec.devices, spec.alone_for)
    return TritonPackage(config, files)


def estimate_reference_bytes(spec: EngineSpec) -> int:
    """float32 weights (a tied head is held twice), the KV pool, and the process; raises `PackagingError`."""
    folder = Path(spec.weights_path)
    config = read_object(folder / "config.json")
    weights = sum(_float32_bytes(path) for path in sorted(folder.glob("*.safetensors")))
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    head_dim = int(config.get("head_dim") or hidden // int(config["num_attention_heads"]))
    kv_heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    head = int(config["vocab_size"]) * hidden * 4 if config.get("tie_word_embeddings") else 0
    pool = math.ceil(spec.kv_pool_tokens / 16) * 16 * layers * 2 * kv_heads * head_dim * 4
    workspace = WORKSPACE_ROWS * (hidden + int(config["intermediate_size"])) * 4
    return weights + head + pool + max(1, spec.tensor_parallel) * (PROCESS_BYTES + workspace)


def _float32_bytes(path: Path) -> int:
    """Bytes of a safetensors file's tensors in float32, from its header alone."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 100_000_000)))  # the format's own limit
    except (OSError, ValueError) as error:
        raise PackagingError(f"{path.name}: not a safetensors file: {error}") from error
    return sum(4 * math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `PackagingError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackagingError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise PackagingError(f"{path}: a JSON object is expected")
    return value

"""What Triton is told to load: a complete model configuration and the files of the model, for each kind of engine.

Pure and light: reads the weights folder's small files, starts nothing. Triton runs with auto-complete off, so every
configuration is whole. Settings reach our Python models as Triton `parameters`, which are strings.

| parameter | meaning |
| --- | --- |
| `weights_path` | the checkpoint folder (`onnx`: the file, or a folder with one `.onnx`) |
| `model_digest` | names the content in KV block keys |
| `slots`, `kv_pool_tokens` | requests at once, and tokens of KV memory that they share |
| `weights_arena` | JSON: files of the checkpoint that lie in shared memory, and where; missing: read the folder |
| `kvstore_address` | empty: no reuse of KV blocks across requests |
| `devices` | JSON: UUIDs of the devices it was placed on, and a token of who has them alone; see `engines.placement` |
| `prefill_chunk_tokens`, `adapters_in_memory`, `adapter_rank_max` | optional; see `engines.reference.loaded_model` |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, assert_never

from engines.placement import DEVICES_PARAMETER, EngineDevice, PackagingError, Placement, placement_of

__all__ = [
    "DEVICES_PARAMETER",
    "AdapterBerths",
    "ArenaRanges",
    "EngineDevice",
    "EngineSpec",
    "PackagingError",
    "Placement",
    "TritonPackage",
    "estimate_device_bytes",
    "maps_file",
    "model_shim",
    "package",
    "placement_of",
    "string_parameters",
]

EngineName = Literal["reference", "onnx", "vllm", "triton"]


@dataclass(frozen=True, slots=True)
class ArenaRanges:
    """Files of the version that lie whole in shared memory: `(offset, bytes)` by their name in the folder."""

    path: str
    ranges: Mapping[str, tuple[int, int]]

    def as_json(self) -> str:
        """The parameter `weights_arena`."""
        return json.dumps({"path": self.path, "files": self.ranges}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class AdapterBerths:
    """Names under which a vLLM instance will find adapters, before it is known which: `<name>-<n>` at `<folder>/<n>`.

    Its backend reads names and paths once, when the model loads. `name` differs for each load, so that what somebody
    remembers of an earlier one names nothing."""

    name: str
    folder: str
    count: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One model version on one node, as the loader decides it.

    `devices` are those it is to stand on; empty = nobody chose, and it runs on the CPU. `tensor_parallel` is how many
    it takes, also where they are not chosen yet; `share` the bytes that it may take on each, 0 = not said; `alone_for`
    a token of the tenant that has them alone, empty = they are shared. `adapter_slots` adapters of rank up to
    `adapter_rank_max` may be mixed in one step of a vLLM instance, which finds them at `berths`; 0 = it serves none."""

    engine: EngineName
    triton_model_name: str
    weights_path: str
    model_digest: str = ""
    slots: int = 4
    kv_pool_tokens: int = 4096
    kvstore_address: str = ""
    devices: tuple[EngineDevice, ...] = ()
    tensor_parallel: int = 1
    share: int = 0
    alone_for: str = ""
    arena: ArenaRanges | None = None
    adapter_slots: int = 0
    adapter_rank_max: int = 16
    berths: AdapterBerths | None = None


@dataclass(frozen=True, slots=True)
class TritonPackage:
    """Arguments of `load_model(name, config=json.dumps(config), files=files)`; file keys are `file:<path>`."""

    config: dict[str, object]
    files: dict[str, bytes] = field(default_factory=dict)


def package(spec: EngineSpec) -> TritonPackage:
    """Make the Triton package of `spec`; raises `PackagingError`. Reads files, changes nothing."""
    match spec.engine:
        case "reference":
            from engines.reference.triton_config import reference_package

            return reference_package(spec)
        case "onnx":
            from engines.onnx.triton_config import onnx_package

            return onnx_package(spec)
        case "vllm":
            from engines.vllm.triton_config import vllm_package

            return vllm_package(spec)
        case "triton":
            from engines.native_package import native_package

            return native_package(spec)
        case _:
            assert_never(spec.engine)


def maps_file(engine: EngineName, name: str) -> bool:
    """Whether the engine reads this file of a version from shared memory, where it is told the place.

    The other engines open paths: for them the disk cache and the kernel's page cache are the host tier."""
    return engine == "reference" and name.endswith(".safetensors")


def estimate_device_bytes(spec: EngineSpec) -> int:
    """Bytes the loaded model will take on all of its devices, to reserve before loading; raises `PackagingError`.

    An upper estimate: weights as the engine holds them and the KV pool, which its devices share evenly, and working
    memory, which it takes on each.
    """
    match spec.engine:
        case "reference":
            from engines.reference.triton_config import estimate_reference_bytes

            return estimate_reference_bytes(spec)
        case "onnx":
            from engines.onnx.triton_config import estimate_onnx_bytes

            return estimate_onnx_bytes(spec)
        case "vllm":
            from engines.vllm.triton_config import estimate_vllm_bytes

            return estimate_vllm_bytes(spec)
        case "triton":
            from engines.native_package import estimate_native_bytes

            return estimate_native_bytes(spec)
        case _:
            assert_never(spec.engine)


def model_shim(module: str) -> bytes:
    """The `model.py` of our Python engines: their code is this package, not a copy in each model folder.

    Triton's stub runs an isolated interpreter that ignores PYTHONPATH, so the shim applies it.
    """
    lines = (
        "import os, sys",
        "sys.path[:0] = [p for p in os.environ.get('PYTHONPATH', '').split(os.pathsep) if p and p not in sys.path]",
        f"from {module} import TritonPythonModel",
    )
    return ("\n".join(lines) + "\n").encode()


def string_parameters(spec: EngineSpec) -> dict[str, object]:
    """The parameters that every Python engine reads, in Triton's JSON form."""
    values = {
        "weights_path": spec.weights_path,
        "model_digest": spec.model_digest,
        "slots": str(spec.slots),
        "kv_pool_tokens": str(spec.kv_pool_tokens),
        "kvstore_address": spec.kvstore_address,
    }
    if spec.arena is not None:
        values["weights_arena"] = spec.arena.as_json()
    return {name: {"string_value": value} for name, value in values.items()}

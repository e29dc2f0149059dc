"""Triton package of an `.onnx` model: its graph's own inputs and outputs become the Triton configuration.

Every named or unknown dimension becomes -1 and `max_batch_size` is 0: the batch dimension, if there is one, is the
caller's own first dimension. Requests are not joined into batches, because a graph does not say that rows are
independent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.packaging import EngineSpec, PackagingError, TritonPackage, model_shim, string_parameters

# ONNX TensorProto.DataType number to Triton's name; those that Triton and onnxruntime share.
TRITON_TYPES = {
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
}

# Measured: resident memory of the stub process with onnxruntime imported.
PROCESS_BYTES = 96 * 2**20


def onnx_package(spec: EngineSpec) -> TritonPackage:
    """Configuration and shim; raises `PackagingError` when the file cannot be served."""
    path = onnx_file(Path(spec.weights_path))
    inputs, outputs = graph_tensors(path)
    config: dict[str, object] = {
        "name": spec.triton_model_name,
        "backend": "python",
        "max_batch_size": 0,
        "input": inputs,
        "output": outputs,
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {**string_parameters(spec), "weights_path": {"string_value": str(path)}},
    }
    return TritonPackage(config, {"file:1/model.py": model_shim("engines.onnx.triton_model")})


def estimate_onnx_bytes(spec: EngineSpec) -> int:
    """Twice the model's files (onnxruntime repacks weights as it optimises), and the process."""
    path = onnx_file(Path(spec.weights_path))
    beside = [file for file in path.parent.glob("*.data") if file.is_file()]
    return PROCESS_BYTES + 2 * sum(file.stat().st_size for file in (path, *beside))


def onnx_file(path: Path) -> Path:
    """The file itself, or the only `.onnx` of a folder; raises `PackagingError`."""
    if path.is_file():
        return path
    found = sorted(path.glob("*.onnx"))
    if len(found) != 1:
        raise PackagingError(f"{path}: one .onnx file is expected, {len(found)} found")
    return found[0]


def graph_tensors(path: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Triton inputs and outputs of the graph; weights listed among its inputs are left out. Raises `PackagingError`."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise PackagingError(f"{path.name}: not an ONNX model: {error}") from error
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [_tensor(path, value) for value in graph.input if value.name not in weights]
    return inputs, [_tensor(path, value) for value in graph.output]


def _tensor(path: Path, value: Any) -> dict[str, object]:
    described = value.type.tensor_type
    data_type = TRITON_TYPES.get(described.elem_type)
    if data_type is None or not value.type.HasField("tensor_type"):
        raise PackagingError(f"{path.name}: {value.name} has a type that Triton cannot carry")
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in described.shape.dim]
    return {"name": value.name, "data_type": data_type, "dims": dims or [1]}

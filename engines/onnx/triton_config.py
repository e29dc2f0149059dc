"""Triton package of an `.onnx` model: its graph's own inputs and outputs become the Triton configuration.

Every named or unknown dimension becomes -1 and `max_batch_size` is 0: the batch dimension, if there is one, is the
caller's own first dimension. Requests are not joined into batches, because a graph does not say that rows are
independent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.packaging import EngineSpec, PackagingError, TritonPackage, model_shim, string_parameters
from engines.placement import hold_process

# onnxruntime's type names to Triton's.
TRITON_TYPES = {
    "tensor(float)": "TYPE_FP32",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(int8)": "TYPE_INT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(string)": "TYPE_STRING",
    "tensor(bool)": "TYPE_BOOL",
    "tensor(float16)": "TYPE_FP16",
    "tensor(double)": "TYPE_FP64",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
}

# Measured: resident memory of the model's process with onnxruntime is 66 MiB, libraries that it shares included.
PROCESS_BYTES = 68 * 2**20


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
    files = {"file:1/model.py": model_shim("engines.onnx.triton_model")}
    hold_process(config, files, spec.devices, spec.alone_for)
    return TritonPackage(config, files)


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
    """Triton inputs and outputs of the graph, as onnxruntime sees it; raises `PackagingError`.

    Opens the graph without optimising it, so this takes as long as reading the file.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # its errors come as exceptions; do not print them too
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base of their own
        raise PackagingError(f"{path.name}: not an ONNX model: {error}") from error
    return [_tensor(path, value) for value in session.get_inputs()], [
        _tensor(path, value) for value in session.get_outputs()
    ]


def _tensor(path: Path, value: Any) -> dict[str, object]:
    data_type = TRITON_TYPES.get(value.type)
    if data_type is None:
        raise PackagingError(f"{path.name}: {value.name} is {value.type}, which Triton cannot carry")
    dims = [dim if isinstance(dim, int) else -1 for dim in value.shape]
    return {"name": value.name, "data_type": data_type, "dims": dims or [1]}

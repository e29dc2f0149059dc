"""Triton package of a native model: a complete Triton model folder, taken as it is.

Whatever backend the node's Triton has may be named in its `config.pbtxt`. A model may state its need of device memory
in the Triton parameter `device_bytes`; otherwise the size of its files counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.packaging import EngineSpec, PackagingError, TritonPackage
from engines.placement import hold_in_server, hold_process

CONFIG_NAME = "config.pbtxt"
OWN_PROCESS = frozenset({"python", "vllm"})  # these run as a process of the model's own; vLLM's is a Python backend


def native_package(spec: EngineSpec) -> TritonPackage:
    """Read the folder at `weights_path`; raises `PackagingError`. All files are held in memory at once."""
    folder = Path(spec.weights_path)
    config = read_model_config(folder)
    config["name"] = spec.triton_model_name
    files = {f"file:{path.relative_to(folder).as_posix()}": path.read_bytes() for path in _model_files(folder)}
    if not any(name.removeprefix("file:").split("/")[0].isdigit() for name in files):
        raise PackagingError(f"{folder}: no version folder with a file in it")
    if config.get("backend") in OWN_PROCESS:
        hold_process(config, files, spec.devices, spec.alone_for)
    else:
        hold_in_server(config, spec.devices, spec.alone_for)
    return TritonPackage(config, files)


def estimate_native_bytes(spec: EngineSpec) -> int:
    """The declared `device_bytes`, else the size of the model's files; raises `PackagingError`."""
    folder = Path(spec.weights_path)
    declared = read_model_config(folder).get("parameters", {}).get("device_bytes", {}).get("string_value")
    if declared is None:
        return sum(path.stat().st_size for path in _model_files(folder))
    if not declared.isdigit():
        raise PackagingError(f"{folder / CONFIG_NAME}: parameter device_bytes must be a whole number, not {declared!r}")
    return int(declared)


def read_model_config(folder: Path) -> dict[str, Any]:
    """`config.pbtxt` in Triton's JSON form; raises `PackagingError`."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    try:
        message = text_format.Parse((folder / CONFIG_NAME).read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise PackagingError(f"{folder / CONFIG_NAME}: {error}") from error
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _model_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != CONFIG_NAME and "__pycache__" not in path.parts
    )

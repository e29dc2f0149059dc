"""How a model is held to the devices it was placed on, in Triton's words.

Triton knows two ways, and which one works depends on where the model's code runs:

- in Triton's own process (TensorRT, ONNX Runtime, libtorch …): an instance group of KIND_GPU with the GPU's number.
  That process counts GPUs as CUDA does, so its node needs CUDA_DEVICE_ORDER=PCI_BUS_ID; it sees one MIG slice at most,
  and an instance stands on one GPU, so slices and gangs are refused.
- in a process of its own (the Python backend, and vLLM's, which is made of it): CUDA_VISIBLE_DEVICES with the UUIDs in
  that process's environment, which works for gangs and slices alike. The backend has no parameter for variables, but
  runs `source <EXECUTION_ENV_PATH>/bin/activate` before the process (python_backend, src/stub_launcher.cc): such a
  folder comes with the model's files. Tried on Triton 2.51 without a GPU; the variable arrived.

Devices without a GPU are KIND_CPU and need nothing. Whatever the way, the parameter `devices` keeps the UUIDs with the
loaded model, so that a loader that finds it later knows where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEVICES_PARAMETER = "devices"
ENVIRONMENT_PARAMETER = "EXECUTION_ENV_PATH"
_ENVIRONMENT = "roundhouse-environment"  # folder in the model's; Triton ignores what is no version


class PackagingError(Exception):
    """A model folder that cannot be turned into a Triton model; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """One device that a model is to stand on."""

    uuid: str
    ordinal: int | None = None  # the GPU's number in Triton's own process; None = it cannot be named there
    visible_as: str = ""  # for CUDA_VISIBLE_DEVICES; empty = no GPU
    capacity: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a loaded model stands, as its parameter says."""

    uuids: tuple[str, ...] = ()  # of its devices; empty = nobody chose
    alone_for: str = ""  # whoever has these devices alone, as a token; empty = they are shared


def placement_parameter(placement: Placement) -> str:
    """What tells a later loader where the model stands."""
    return json.dumps({"uuids": placement.uuids, "alone_for": placement.alone_for})


def placement_of(parameter: str) -> Placement:
    """What a parameter says that `placement_parameter` made; nothing if it is not one."""
    try:
        value = json.loads(parameter or "{}")
        return Placement(tuple(map(str, value["uuids"])), str(value["alone_for"]))
    except (ValueError, KeyError, TypeError):
        return Placement()


def hold_process(
    config: dict[str, object], files: dict[str, bytes], devices: Sequence[EngineDevice], alone_for: str = ""
) -> None:
    """Hold a model that runs in a process of its own to its devices; changes `config` and `files`.

    Raises PackagingError: it brings an environment of its own, and there are GPUs."""
    parameters = _parameters(config)
    parameters.update(_placed(devices, alone_for))
    visible = [device.visible_as for device in devices if device.visible_as]
    if not visible:
        return
    if ENVIRONMENT_PARAMETER in parameters:
        raise PackagingError(f"it sets {ENVIRONMENT_PARAMETER}, which is needed to hold it to its GPUs")
    files[f"file:{_ENVIRONMENT}/bin/activate"] = f"export CUDA_VISIBLE_DEVICES='{','.join(visible)}'\n".encode()
    parameters[ENVIRONMENT_PARAMETER] = {"string_value": f"$$TRITON_MODEL_DIRECTORY/{_ENVIRONMENT}"}
    config["instance_group"] = [{"kind": "KIND_MODEL", "count": _instances(config)}]


def hold_in_server(config: dict[str, object], devices: Sequence[EngineDevice], alone_for: str = "") -> None:
    """Hold a model that runs in Triton's own process to its device; changes `config`.

    Raises PackagingError: it stands on several GPUs, or on one that this process cannot name."""
    _parameters(config).update(_placed(devices, alone_for))
    if not any(device.visible_as for device in devices):
        return
    if len(devices) > 1:
        raise PackagingError("its backend runs in Triton's own process, where an instance takes one GPU, not several")
    if devices[0].ordinal is None:
        raise PackagingError("its backend runs in Triton's own process, which cannot be held to this MIG slice")
    config["instance_group"] = [{"kind": "KIND_GPU", "gpus": [devices[0].ordinal], "count": _instances(config)}]


def _placed(devices: Sequence[EngineDevice], alone_for: str) -> dict[str, object]:
    if not devices:
        return {}
    placement = Placement(tuple(device.uuid for device in devices), alone_for)
    return {DEVICES_PARAMETER: {"string_value": placement_parameter(placement)}}


def _parameters(config: dict[str, object]) -> dict[str, object]:
    parameters = config.setdefault("parameters", {})
    assert isinstance(parameters, dict)
    return parameters


def _instances(config: Mapping[str, object]) -> int:
    """How many instances its own configuration asks for."""
    groups = config.get("instance_group")
    counts = [group.get("count", 1) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return max(1, *counts) if counts else 1

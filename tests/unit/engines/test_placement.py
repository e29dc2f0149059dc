"""How each kind of engine is held to its devices, in the configuration that Triton gets."""

import json
from pathlib import Path

import pytest

from engines.packaging import EngineDevice, EngineSpec, PackagingError, Placement, TritonPackage, package, placement_of
from tests.builders.checkpoints import knob_model, random_checkpoint

GPU_2 = EngineDevice("GPU-2", ordinal=2, visible_as="GPU-2", capacity=100)
GPU_3 = EngineDevice("GPU-3", ordinal=3, visible_as="GPU-3", capacity=100)
SLICE = EngineDevice("MIG-a", visible_as="MIG-a", capacity=40)
HOST = EngineDevice("device-0", capacity=100)
ACTIVATE = "file:roundhouse-environment/bin/activate"


def native(folder: Path, backend: str, *devices: EngineDevice) -> TritonPackage:
    """A package of a Triton model folder of some backend."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.bin").write_bytes(b"weights")
    (folder / "config.pbtxt").write_text(f'backend: "{backend}" instance_group [{{ count: 2 kind: KIND_CPU }}]')
    return package(EngineSpec("triton", "m", str(folder), devices=devices))


def placed(packaged: TritonPackage) -> Placement:
    """What a later loader reads of the package."""
    parameters = packaged.config["parameters"]
    assert isinstance(parameters, dict)
    return placement_of(parameters["devices"]["string_value"])


@pytest.mark.parametrize("devices", [(HOST,), ()])
def test_without_a_gpu_it_runs_on_the_cpu(tmp_path: Path, devices: tuple[EngineDevice, ...]) -> None:
    """KIND_CPU, no environment; where it stands is kept if somebody chose."""
    packaged = package(EngineSpec("reference", "m", str(random_checkpoint(tmp_path / "m")), devices=devices))
    assert packaged.config["instance_group"] == [{"kind": "KIND_CPU", "count": 1}]
    assert list(packaged.files) == ["file:1/model.py"]
    assert "EXECUTION_ENV_PATH" not in str(packaged.config)
    assert ("devices" in str(packaged.config["parameters"])) == bool(devices)


@pytest.mark.parametrize(("devices", "visible"), [((GPU_2, GPU_3), "GPU-2,GPU-3"), ((SLICE,), "MIG-a")])
def test_a_process_of_its_own_sees_only_its_gpus(
    tmp_path: Path, devices: tuple[EngineDevice, ...], visible: str
) -> None:
    """Gangs and slices alike: one instance that takes its devices itself, and their UUIDs in its environment."""
    packaged = package(
        EngineSpec("vllm", "m", str(random_checkpoint(tmp_path / "m")), devices=devices, share=20, alone_for="token")
    )
    assert packaged.config["instance_group"] == [{"kind": "KIND_MODEL", "count": 1}]
    assert packaged.files[ACTIVATE] == f"export CUDA_VISIBLE_DEVICES='{visible}'\n".encode()
    assert "$$TRITON_MODEL_DIRECTORY/roundhouse-environment" in str(packaged.config["parameters"])
    assert placed(packaged) == Placement(tuple(device.uuid for device in devices), "token")
    arguments = json.loads(packaged.files["file:1/model.json"])
    # 20 of 100 bytes on each GPU, 20 of 40 on the slice
    assert arguments["gpu_memory_utilization"] == (0.5 if devices == (SLICE,) else 0.2)
    assert arguments["tensor_parallel_size"] == len(devices)


def test_an_engine_in_tritons_process_gets_one_gpu_by_its_number(tmp_path: Path) -> None:
    """KIND_GPU with the GPU's number; the number of instances stays the model's own choice."""
    packaged = native(tmp_path / "m", "tensorrt", GPU_2)
    assert packaged.config["instance_group"] == [{"kind": "KIND_GPU", "gpus": [2], "count": 2}]
    assert placed(packaged) == Placement(("GPU-2",))


@pytest.mark.parametrize(("devices", "cause"), [((GPU_2, GPU_3), "one GPU, not several"), ((SLICE,), "MIG slice")])
def test_an_engine_in_tritons_process_takes_no_gang_and_no_slice(
    tmp_path: Path, devices: tuple[EngineDevice, ...], cause: str
) -> None:
    """That process cannot be held to them: refused with the reason, not run somewhere else."""
    with pytest.raises(PackagingError, match=cause):
        native(tmp_path / "m", "tensorrt", *devices)


def test_an_environment_of_the_models_own_is_not_overwritten(tmp_path: Path) -> None:
    """Triton knows one environment a model."""
    folder = knob_model(tmp_path / "m")
    config = folder / "config.pbtxt"
    config.write_text(
        config.read_text() + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/env.tar.gz" } }\n'
    )
    assert package(EngineSpec("triton", "m", str(folder), devices=(HOST,)))
    with pytest.raises(PackagingError, match="EXECUTION_ENV_PATH"):
        package(EngineSpec("triton", "m", str(folder), devices=(GPU_2,)))


@pytest.mark.parametrize("text", ["", "no json", "7", '{"a": 1}'])
def test_a_parameter_that_is_not_ours_names_no_devices(text: str) -> None:
    """A model's own parameter may have the same name."""
    assert placement_of(text) == Placement()

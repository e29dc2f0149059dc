"""What devices a node has: as declared, as NVML says (a stand-in for its module), and without either."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from roundhouse.errors import InvalidInput
from services.loader.adapters.declared_devices import read_declaration
from services.loader.adapters.find_devices import inventory
from services.loader.adapters.nvml_devices import find_devices
from services.loader.domain.devices import Device

GB = 10**9
OURS, THEIRS = 41, 99


class NVMLError(Exception):
    """As in pynvml."""


class NVMLError_NotFound(NVMLError):  # noqa: N801 - the name in pynvml
    """As in pynvml."""


@dataclass(eq=False)
class Gpu:
    """A GPU or a slice, and whom it is linked with."""

    uuid: str
    bytes: int = 80 * GB
    used: int = 0
    name: str = "NVIDIA H100"
    slices: list["Gpu | None"] = field(default_factory=list)
    nvlinks: set[str] = field(default_factory=set)
    switch: str = ""
    running: dict[int, int] = field(default_factory=dict)


class FakeNvml:
    """The part of pynvml that is used, with its names and its ways to fail."""

    NVMLError = NVMLError
    NVMLError_NotFound = NVMLError_NotFound
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_TOPOLOGY_SINGLE = 10
    nvmlMemory_v2 = 2  # noqa: N815 - the name in pynvml

    def __init__(self, *gpus: Gpu, is_there: bool = True, is_old: bool = False) -> None:
        self.gpus = gpus
        self.is_there = is_there
        self.is_old = is_old

    def __getattr__(self, name: str) -> Any:
        """`nvmlDeviceGetCount` and the like are the methods below without their prefix."""
        return object.__getattribute__(self, name.removeprefix("nvmlDeviceGet").removeprefix("nvml"))

    def Init(self) -> None:
        if not self.is_there:
            raise NVMLError("NVML Shared Library Not Found")

    def Count(self) -> int:
        return len(self.gpus)

    def HandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def UUID(self, gpu: Gpu) -> bytes:
        return gpu.uuid.encode()  # older versions answer in bytes

    def Name(self, gpu: Gpu) -> str:
        return gpu.name

    def MemoryInfo(self, gpu: Gpu, version: int | None = None) -> Any:
        if version and self.is_old:
            raise NVMLError("Function Not Found")
        reserved = GB if version else 0
        return SimpleNamespace(total=gpu.bytes, reserved=reserved, used=gpu.used)

    def MigMode(self, gpu: Gpu) -> list[int]:
        if self.is_old:
            raise NVMLError("Not Supported")
        return [int(bool(gpu.slices)), 0]

    def MaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def MigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        found = gpu.slices[index] if index < len(gpu.slices) else None
        if found is None:
            raise NVMLError_NotFound("Not Found")
        return found

    def Attributes(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpuInstanceSliceCount=2, memorySizeMB=gpu.bytes // 2**20)

    def P2PStatus(self, one: Gpu, other: Gpu, kind: int) -> int:
        return 0 if other.uuid in one.nvlinks or one.uuid in other.nvlinks else 2

    def TopologyCommonAncestor(self, one: Gpu, other: Gpu) -> int:
        return 10 if one.switch and one.switch == other.switch else 30

    def ComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.running.items()]


def seen(nvml: FakeNvml, bytes_most: int = 0) -> tuple[Device, ...]:
    """The devices that the adapter makes of it."""
    found = find_devices(bytes_most, cast("ModuleType", nvml))
    assert found is not None
    return found.devices


def test_nvml_names_whole_gpus_with_their_links() -> None:
    """A ring of four, each linked with its neighbours: pairs, because a group is linked each with each; less 1 GB that
    the driver keeps."""
    ring = [Gpu(f"GPU-{n}", nvlinks={f"GPU-{(n + 1) % 4}"}) for n in range(4)]
    devices = seen(FakeNvml(*ring))
    assert [(d.index, d.uuid, d.ordinal, d.visible_as) for d in devices] == [
        (n, f"GPU-{n}", n, f"GPU-{n}") for n in range(4)
    ]
    assert {d.capacity for d in devices} == {79 * GB}
    assert [d.link_group for d in devices] == [0, 0, 1, 1]


def test_without_nvlink_one_pcie_switch_is_a_link() -> None:
    """Two switches with two GPUs each, one GPU elsewhere."""
    gpus = [Gpu("a", switch="x"), Gpu("b", switch="y"), Gpu("c", switch="x"), Gpu("d", switch="y"), Gpu("e")]
    assert [d.link_group for d in seen(FakeNvml(*gpus))] == [0, 1, 0, 1, 2]


def test_nvml_names_slices_with_their_profiles() -> None:
    """A divided GPU is its slices, each a group of its own; beside it no GPU can be named by number in Triton."""
    slices: list[Gpu | None] = [
        Gpu("MIG-1", 10 * GB, name="NVIDIA H100 MIG 1g.10gb"),
        None,
        Gpu("MIG-2", 20 * 2**30, name="a name without"),
    ]
    devices = seen(FakeNvml(Gpu("GPU-0"), Gpu("GPU-1", slices=slices)))
    assert [(d.uuid, d.profile, d.ordinal) for d in devices] == [
        ("GPU-0", "", None),
        ("MIG-1", "1g.10gb", None),
        ("MIG-2", "2g.20gb", None),
    ]
    assert len({d.link_group for d in devices}) == 3


def test_a_lone_slice_is_the_first_device_of_its_triton() -> None:
    """A container that was given one slice: CUDA sees it as device 0."""
    (device,) = seen(FakeNvml(Gpu("GPU-0", slices=[Gpu("MIG-1", name="X MIG 1g.10gb")])))
    assert (device.ordinal, device.is_slice) == (0, True)


def test_an_old_driver_and_a_cap() -> None:
    """No MIG, no second form of the memory query; DEVICE_BYTES caps each device."""
    assert seen(FakeNvml(Gpu("GPU-0"), is_old=True))[0].capacity == 80 * GB
    assert seen(FakeNvml(Gpu("GPU-0")), bytes_most=50 * GB)[0].capacity == 50 * GB


async def test_nvml_tells_what_is_in_use_and_by_whom() -> None:
    """In all, and by some processes on each device; a query that fails tells nothing."""
    nvml = FakeNvml(Gpu("a", used=7, running={OURS: 5, THEIRS: 2}), Gpu("b", used=3, running={OURS: 3}), Gpu("c"))
    found = find_devices(0, cast("ModuleType", nvml))
    assert found is not None
    assert await found.used_bytes() == {0: 7, 1: 3, 2: 0}
    assert await found.held_by([OURS]) == {0: 5, 1: 3}
    nvml.gpus = ()
    nvml.MemoryInfo = _fails  # type: ignore[method-assign]
    assert await found.used_bytes() is None


def _fails(*_: object, **__: object) -> Any:
    raise NVMLError("GPU is lost")


def test_a_node_without_gpu_is_one_device_of_the_size_that_it_is_told() -> None:
    """No NVML, or no GPU: as before there were devices. Without a size there is nothing to start with."""
    assert find_devices(0, cast("ModuleType", FakeNvml(is_there=False))) is None
    assert find_devices(0, cast("ModuleType", FakeNvml())) is None
    (device,) = inventory("host", 100).devices
    assert (device.index, device.capacity, device.visible_as, device.is_slice) == (0, 100, "", False)
    with pytest.raises(InvalidInput, match="DEVICE_BYTES"):
        inventory("host", 0)


DECLARED = """
- {bytes: 80, uuid: GPU-5, gpu: 0, link_group: 1}
- {bytes: 10, uuid: MIG-9, mig: 1g.10gb, cuda: MIG-9, link_group: 2}
- {bytes: 20}
"""


def test_a_declaration_names_devices_in_its_order(tmp_path: Path) -> None:
    """In the setting as JSON or in a file as YAML; a device without GPU has no name for CUDA."""
    (tmp_path / "devices.yaml").write_text(DECLARED)
    assert inventory(str(tmp_path / "devices.yaml"), 0).devices == (
        Device(0, "GPU-5", 80, 1, "", 0, "GPU-5"),
        Device(1, "MIG-9", 10, 2, "1g.10gb", None, "MIG-9"),
        Device(2, "device-2", 20),
    )
    assert [each.capacity for each in inventory('[{"bytes": 5}, {"bytes": 6}]', 0).devices] == [5, 6]


@pytest.mark.parametrize(
    "text", ["[]", '[{"bytes": 0}]', '[{"size": 5}]', "/nowhere/devices.yaml", '[{"bytes": 1, "uuid": "a"}, ' * 2 + "]"]
)
def test_a_wrong_declaration_ends_the_start(text: str) -> None:
    """Said in one line, not at the first load."""
    with pytest.raises(InvalidInput, match="devices"):
        read_declaration(text)
    with pytest.raises(InvalidInput, match="same uuid"):
        read_declaration('[{"bytes": 1, "uuid": "a"}, {"bytes": 1, "uuid": "a"}]')

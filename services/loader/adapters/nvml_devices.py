"""Devices as NVML sees them: whole GPUs, MIG slices, which of them are linked, and what is in use on each.

Written against NVML's interface as nvidia-ml-py has it (docs.nvidia.com/deploy/nvml-api: device queries, multi-instance
GPU, topology). Tested with a stand-in for that module; it has not been run on hardware. The module is imported
only here and only when asked for. Two notes on what NVML says:

- its GPUs are in PCI order; CUDA's are only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which the node's Triton needs
- processes are named by the ids of the host's namespace: a loader that does not share it measures no model
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import structlog

from services.loader.domain.devices import Device

log = structlog.get_logger(__name__)
Answer = TypeVar("Answer")

ASK_TIMEOUT_S = 5.0  # NVML answers in milliseconds, and not at all where a GPU fell off its bus. A guess.


@dataclass(frozen=True, slots=True)
class _Found:
    handle: Any
    device: Device


class NvmlDevices:
    """`DeviceInventory` over NVML. The list is read once; a node whose GPUs are divided anew restarts its loader."""

    def __init__(self, nvml: ModuleType, found: Sequence[_Found]) -> None:
        self._nvml = nvml
        self._found = tuple(found)

    @property
    def devices(self) -> tuple[Device, ...]:
        """See `DeviceInventory.devices`."""
        return tuple(each.device for each in self._found)

    async def used_bytes(self) -> Mapping[int, int] | None:
        """See `DeviceInventory.used_bytes`."""
        return await self._ask(lambda: {each.device.index: _memory(self._nvml, each.handle)[1] for each in self._found})

    async def held_by(self, pids: Sequence[int]) -> Mapping[int, int]:
        """See `DeviceInventory.held_by`."""
        wanted = frozenset(pids)
        return await self._ask(lambda: dict(self._held(wanted))) or {}

    def _held(self, pids: frozenset[int]) -> Iterator[tuple[int, int]]:
        for each in self._found:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(each.handle)
            held = sum(process.usedGpuMemory or 0 for process in running if process.pid in pids)
            if held:
                yield each.device.index, held

    async def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await asyncio.to_thread(question)
        except (self._nvml.NVMLError, TimeoutError) as error:
            log.warning("nvml_does_not_tell", reason=str(error) or "no answer")
            return None


def find_devices(bytes_most: int, nvml: ModuleType | None = None) -> NvmlDevices | None:
    """The node's devices; None if it has no NVML or no GPU. Blocking. `bytes_most` caps each device; 0 = no cap."""
    if nvml is None:
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        found = _devices(nvml, bytes_most)
    except nvml.NVMLError as error:
        log.info("no_nvml", reason=str(error))
        return None
    return NvmlDevices(nvml, found) if found else None


def _devices(nvml: ModuleType, bytes_most: int) -> list[_Found]:
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    groups = _link_groups(nvml, gpus)
    divided = [_is_divided(nvml, gpu) for gpu in gpus]
    found: list[_Found] = []
    for number, gpu in enumerate(gpus):
        if divided[number]:
            for piece in _slices(nvml, gpu):
                name = _text(nvml.nvmlDeviceGetName(piece))
                device = _device(nvml, piece, len(found), bytes_most)
                # Slices exchange nothing directly, so each is a group of its own, after those of the whole GPUs.
                group = len(gpus) + len(found)
                found.append(_Found(piece, replace(device, link_group=group, profile=_profile(nvml, piece, name))))
        else:
            # CUDA numbers the GPUs of a process; beside a divided one its count is not NVML's.
            ordinal = None if any(divided) else number
            device = _device(nvml, gpu, len(found), bytes_most)
            found.append(_Found(gpu, replace(device, link_group=groups[number], ordinal=ordinal)))
    if len(found) == 1 and found[0].device.ordinal is None:
        found[0] = _Found(found[0].handle, replace(found[0].device, ordinal=0))  # the only one that CUDA can see
    return found


def _device(nvml: ModuleType, handle: Any, index: int, bytes_most: int) -> Device:
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    size = _memory(nvml, handle)[0]
    return Device(index, uuid, min(size, bytes_most) if bytes_most else size, visible_as=uuid)


def _memory(nvml: ModuleType, handle: Any) -> tuple[int, int]:
    """Bytes that models could take in all, and bytes in use by anyone; without what the driver keeps, where told."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # an older driver
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)
    return int(memory.total - memory.reserved), int(memory.used)


def _is_divided(nvml: ModuleType, gpu: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:
        return False  # a kind that cannot be divided
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _slices(nvml: ModuleType, gpu: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError_NotFound:
            continue  # numbers have gaps


def _profile(nvml: ModuleType, piece: Any, name: str) -> str:
    """Such as 1g.10gb, from a name such as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`, else from its attributes."""
    _, found, profile = name.rpartition("MIG ")
    if found:
        return profile
    attributes = nvml.nvmlDeviceGetAttributes(piece)
    return f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"


def _link_groups(nvml: ModuleType, gpus: Sequence[Any]) -> list[int]:
    """The group of each GPU: it is linked with each other member, by NVLink, or where there is none by a PCIe switch.

    A GPU joins the first group of which it is linked with everyone, so a partly linked ring falls into pairs."""
    by_nvlink = {
        frozenset((one, other))
        for one in range(len(gpus))
        for other in range(one)
        if _has_nvlink(nvml, gpus[one], gpus[other])
    }
    groups: list[list[int]] = []
    for number, gpu in enumerate(gpus):
        for group in groups:
            if all(
                frozenset((number, other)) in by_nvlink if by_nvlink else _shares_switch(nvml, gpu, gpus[other])
                for other in group
            ):
                group.append(number)
                break
        else:
            groups.append([number])
    return [next(index for index, group in enumerate(groups) if number in group) for number in range(len(gpus))]


def _has_nvlink(nvml: ModuleType, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _shares_switch(nvml: ModuleType, one: Any, other: Any) -> bool:
    try:
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except nvml.NVMLError:
        return False
    return bool(level <= nvml.NVML_TOPOLOGY_SINGLE)


def _text(value: str | bytes) -> str:
    """Older versions of the module answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value

"""Devices as the node's settings declare them: where there is no GPU, or NVML does not see what models may take.

The declaration is JSON or YAML, in the setting itself or in a file that it names: a list of devices in their order,

    - {bytes: 80000000000, uuid: GPU-5c3…, gpu: 0, link_group: 0}
    - {bytes: 10000000000, uuid: MIG-9a1…, mig: 1g.10gb, cuda: MIG-9a1…, link_group: 1}

Nothing is known of what is really in use there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from roundhouse.errors import InvalidInput
from services.loader.domain.devices import Device


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device of a declaration."""

    bytes: int
    uuid: str = ""
    link_group: int = 0
    mig: str = ""  # the slice's profile
    gpu: int | None = None  # its number in Triton's process
    cuda: str = ""  # its name for CUDA_VISIBLE_DEVICES; empty = the uuid, if it is a GPU


class DeclaredDevices:
    """`DeviceInventory` of a declaration."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)

    @property
    def devices(self) -> tuple[Device, ...]:
        """See `DeviceInventory.devices`."""
        return self._devices

    async def used_bytes(self) -> Mapping[int, int] | None:
        """See `DeviceInventory.used_bytes`."""
        return None

    async def held_by(self, pids: Sequence[int]) -> Mapping[int, int]:
        """See `DeviceInventory.held_by`."""
        return {}


def one_device(size: int) -> DeclaredDevices:
    """A node that is one device."""
    return DeclaredDevices([Device(0, "device-0", size)])


def read_declaration(text: str) -> DeclaredDevices:
    """Devices of a declaration, or of the file that `text` names. Blocking. Raises InvalidInput."""
    source = text
    if not text.lstrip().startswith(("[", "-")):
        try:
            source = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"devices: {text}: {error.strerror}") from error
    try:
        declared = msgspec.yaml.decode(source, type=list[Declared])
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"devices: {error}") from error
    devices = [_device(index, each) for index, each in enumerate(declared)]
    if not devices or any(each.capacity <= 0 for each in devices):
        raise InvalidInput("devices: at least one, each with more than 0 bytes")
    if len({each.uuid for each in devices}) < len(devices):
        raise InvalidInput("devices: two have the same uuid")
    return DeclaredDevices(devices)


def _device(index: int, declared: Declared) -> Device:
    uuid = declared.uuid or f"device-{index}"
    is_gpu = declared.gpu is not None
    return Device(
        index=index,
        uuid=uuid,
        capacity=declared.bytes,
        link_group=declared.link_group,
        profile=declared.mig,
        ordinal=declared.gpu,
        visible_as=declared.cuda or (declared.uuid or str(declared.gpu) if is_gpu else ""),
    )

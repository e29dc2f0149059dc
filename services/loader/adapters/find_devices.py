"""Which devices this node has: declared, or seen by NVML, or one of the size that its settings say."""

import structlog

from roundhouse.errors import InvalidInput
from services.loader.adapters.declared_devices import one_device, read_declaration
from services.loader.adapters.nvml_devices import find_devices
from services.loader.device_ports import DeviceInventory

log = structlog.get_logger(__name__)


HOST = "host"


def inventory(declared: str, device_bytes: int) -> DeviceInventory:
    """The node's devices, by the settings DEVICES and DEVICE_BYTES. Blocking.

    Raises InvalidInput: a declaration that is none, or nothing says a size."""
    found: DeviceInventory | None
    if declared == HOST:
        found = None
    elif declared:
        found = read_declaration(declared)
    else:
        found = find_devices(device_bytes)
    if found is None:
        if not device_bytes:
            raise InvalidInput("ROUNDHOUSE_DEVICE_BYTES or ROUNDHOUSE_DEVICES is needed: there is no GPU to ask")
        found = one_device(device_bytes)
    for device in found.devices:
        log.info("device", index=device.index, uuid=device.uuid, bytes=device.capacity, group=device.link_group)
    return found

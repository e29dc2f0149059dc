"""Whether a load may begin: it fits the node at all, and room can be made from what may leave.

Either everything is promised in one step or nothing changed (case B22): no byte is staged and nobody is told to leave
for a load that cannot happen. The device's free bytes are reserved at once; those of the instances that must leave are
promised, and pass to the load in the step that releases them. Until then they stay loaded: if the weights turn out to
be bad, nobody was unloaded for them.
"""

from collections.abc import Hashable
from typing import TypeVar

from roundhouse.errors import CapacityExhausted, InvalidInput
from roundhouse.vocabulary import Digest
from services.loader.domain.instance import State
from services.loader.domain.room import (
    CachedWeights,
    Leaving,
    NotEnough,
    Offered,
    choose_cache_evictions,
    choose_leaving,
)
from services.loader.domain.versions import ModelVersion
from services.loader.operations.node import Node, Residence

Key = TypeVar("Key", bound=Hashable)

NEVER_FITS = "never_fits"
"""`code` of the error for what this node can never hold."""


def choose_victims(node: Node, home: Residence) -> tuple[ModelVersion, ...]:
    """Who must leave the device for `home`, of those its caller allowed. Changes nothing.

    Raises InvalidInput with code NEVER_FITS, CapacityExhausted."""
    _refuse_what_never_fits("device", home.device_bytes, node.device.capacity)
    offered = [
        Offered(version, node.device.held_by(version).resident)
        for version in dict.fromkeys(home.unload_first)
        if _may_leave(node, version) and version != home.instance.version
    ]
    return _keys(choose_leaving(home.device_bytes - node.device.free, offered), "device")


def check_disk(node: Node, digest: Digest, size: int) -> tuple[Digest, ...]:
    """Which cached weights must go so that `size` bytes of `digest` fit on disk. Changes nothing.

    Raises as `choose_victims`."""
    if digest in node.disk.holdings:
        return ()
    _refuse_what_never_fits("disk", size, node.disk.capacity)
    in_use = node.digests_in_use()
    cached = [
        CachedWeights(key, held.total, node.disk_used_ms.get(key, 0), in_use=key in in_use or held.reserved > 0)
        for key, held in node.disk.holdings.items()
        if key not in node.disk_leaving
    ]
    return _keys(choose_cache_evictions(size - node.disk.free, cached), "disk")


def host_evictions(node: Node, digest: Digest, size: int) -> tuple[Digest, ...] | None:
    """Which weights to stop counting in host memory for `size` bytes of `digest`; None if they cannot be held there."""
    if digest in node.host.holdings:
        return ()
    in_use = node.digests_in_use()
    cached = [
        CachedWeights(key, held.total, node.host_used_ms.get(key, 0), in_use=key in in_use)
        for key, held in node.host.holdings.items()
    ]
    match choose_cache_evictions(size - node.host.free, cached):
        case Leaving(keys):
            return keys
        case NotEnough():
            return None


def _may_leave(node: Node, version: ModelVersion) -> bool:
    home = node.residences.get(version)
    return home is not None and home.instance.state is State.READY and home.promised_to is None


def _refuse_what_never_fits(tier: str, size: int, capacity: int) -> None:
    if size > capacity:
        raise InvalidInput(f"needs {size} bytes of {tier}, this node has {capacity}", code=NEVER_FITS)


def _keys(choice: Leaving[Key] | NotEnough, tier: str) -> tuple[Key, ...]:
    match choice:
        case Leaving(keys):
            return keys
        case NotEnough(missing):
            raise CapacityExhausted(f"{missing} bytes of {tier} are missing beside what may not be unloaded")

"""What the loader's operations need of the node's devices and processes. See `ports`, of which this is a part."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.loader.domain.berths import Berths
from services.loader.domain.devices import Device


@dataclass(frozen=True, slots=True)
class Setting:
    """Where an instance is to stand, and what it finds there."""

    devices: tuple[Device, ...] = ()  # empty = nobody chose
    alone_for: str = ""  # token of who has them alone; empty = they are shared
    berths: Berths | None = None  # where it finds adapters, if it does not open their paths


class DeviceInventory(Protocol):
    """What a node can put models on, and what is really in use there."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices, at least one; the same for the life of the process."""
        ...

    async def used_bytes(self) -> Mapping[int, int] | None:
        """Bytes in use on each device, by whomever; None if it cannot be told, now or ever."""
        ...

    async def held_by(self, pids: Sequence[int]) -> Mapping[int, int]:
        """Bytes that processes hold on each device; devices without are missing, as is what cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Triton's own process, and what it holds beside its models."""

    pid: int
    bytes_beside_models: int


class ModelProcesses(Protocol):
    """The operating system's processes of Triton's models, where this process can see them."""

    async def find(self, triton_name: str) -> Sequence[int] | None:
        """Process ids that run the model; None if they cannot be told (another container, no such backend)."""
        ...

    async def end(self, pids: Sequence[int]) -> None:
        """End them at once, and return when their memory is free. Idempotent.

        Raises Unavailable: this process may not, or they do not end."""
        ...

    async def memory_bytes(self, pids: Sequence[int]) -> int:
        """Memory of their own and of their descendants, without what they share; 0 if it cannot be told."""
        ...

    async def family(self, pids: Sequence[int]) -> Sequence[int]:
        """These and their descendants."""
        ...

    async def server(self, models: Collection[str]) -> ServerMemory | None:
        """Triton's memory without that of these loaded models; None if it cannot be seen from here.

        What a model's process left behind counts as Triton's."""
        ...

    async def end_server(self, pid: int, patience_ms: int) -> None:
        """Ask Triton to end, make it after `patience_ms`, and end what it left behind. Nothing is started.

        Raises Unavailable as `end`."""
        ...

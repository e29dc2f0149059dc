"""What a node has to put models on: whole GPUs, MIG slices, or memory that is declared as a device.

Devices of one link group exchange tensors directly, each with each; a model with tensor parallelism k stands on k of
one group. Where the list comes from, `adapters` know (NVML, or the node's settings).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `index` names it in orders and states of this node, `uuid` also beyond this process."""

    index: int
    uuid: str
    capacity: int  # bytes that models may take
    link_group: int = 0
    profile: str = ""  # of a MIG slice, such as "1g.10gb"; empty = not a slice
    ordinal: int | None = None  # the GPU's number in Triton's own process; None = that process cannot name it
    visible_as: str = ""  # what CUDA_VISIBLE_DEVICES calls it; empty = no GPU

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice, with memory and compute of its own."""
        return bool(self.profile)

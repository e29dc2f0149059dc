"""The words of the domain as types, so that what could be swapped cannot be.

Source: ARCHITECTURE.md, "Words". Wire enums are converted here and nowhere else.
"""

from enum import StrEnum
from typing import NewType

from roundhouse.wire.v1 import vocabulary_pb2 as wire

TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
NodeId = NewType("NodeId", str)
GatewayId = NewType("GatewayId", str)
PoolName = NewType("PoolName", str)
ModelName = NewType("ModelName", str)
AdapterName = NewType("AdapterName", str)
Digest = NewType("Digest", str)  # "sha256:<64 hex digits>"
TokenCount = NewType("TokenCount", int)


class PriorityClass(StrEnum):
    """Priority class of a request, most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    def to_wire(self) -> "wire.PriorityClass.ValueType":
        """The protobuf value of this class."""
        return _CLASS_TO_WIRE[self]

    @staticmethod
    def from_wire(value: "wire.PriorityClass.ValueType") -> "PriorityClass":
        """The class of a protobuf value; unknown and unspecified values mean `standard`."""
        return _CLASS_FROM_WIRE.get(value, PriorityClass.STANDARD)


class Outcome(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"
    ABANDONED = "abandoned"

    def to_wire(self) -> "wire.Outcome.ValueType":
        """The protobuf value of this outcome."""
        return _OUTCOME_TO_WIRE[self]

    @staticmethod
    def from_wire(value: "wire.Outcome.ValueType") -> "Outcome":
        """The outcome of a protobuf value; unknown and unspecified values mean `failed`."""
        return _OUTCOME_FROM_WIRE.get(value, Outcome.FAILED)


_CLASS_TO_WIRE: dict[PriorityClass, "wire.PriorityClass.ValueType"] = {
    PriorityClass.INTERACTIVE: wire.PRIORITY_CLASS_INTERACTIVE,
    PriorityClass.STANDARD: wire.PRIORITY_CLASS_STANDARD,
    PriorityClass.BATCH: wire.PRIORITY_CLASS_BATCH,
}
_CLASS_FROM_WIRE = {value: key for key, value in _CLASS_TO_WIRE.items()}

_OUTCOME_TO_WIRE: dict[Outcome, "wire.Outcome.ValueType"] = {
    Outcome.DONE: wire.OUTCOME_DONE,
    Outcome.CANCELLED: wire.OUTCOME_CANCELLED,
    Outcome.FAILED: wire.OUTCOME_FAILED,
    Outcome.EXPIRED: wire.OUTCOME_EXPIRED,
    Outcome.ABANDONED: wire.OUTCOME_ABANDONED,
}
_OUTCOME_FROM_WIRE = {value: key for key, value in _OUTCOME_TO_WIRE.items()}

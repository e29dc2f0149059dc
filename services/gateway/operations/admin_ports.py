"""What the operators' operations need of the world, beside the ports of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from roundhouse.vocabulary import KeyId, TenantId
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.gateway.domain.keys import KeyRecord


class KeyRegistry(Protocol):
    """Where keys are made and ended."""

    async def add(self, record: KeyRecord) -> None:
        """Make the key work from now on, everywhere. Idempotent by key id. Raises Unavailable."""
        ...

    async def revoke(self, key_id: KeyId, now_ms: int) -> KeyRecord:
        """End a key at once, everywhere (case B06). Idempotent. Raises NotFound, Unavailable."""
        ...

    async def end_at(self, key_id: KeyId, at_ms: int, *, now_ms: int) -> KeyRecord:
        """Let a key end then, everywhere, if it does not end sooner. Idempotent. Raises NotFound, Unavailable."""
        ...

    async def find(self, key_id: KeyId) -> KeyRecord:
        """The record of one key. Raises NotFound, Unavailable."""
        ...

    async def of_tenant(self, tenant_id: TenantId) -> list[KeyRecord]:
        """Every key of a tenant, ended ones too, oldest first. Raises Unavailable."""
        ...


class AuditTrail(Protocol):
    """Tells operators who changed what."""

    async def record(
        self, what: str, *, actor: KeyId, subject: str, reason: str = "", details: Mapping[str, str] | None = None
    ) -> None:
        """Write one event. Never raises for a missing bus: what was done stays done, and the log has it."""
        ...


class NodeStates(Protocol):
    """What the nodes say of themselves."""

    async def all(self) -> Sequence[loading_pb2.NodeState]:
        """The newest state of every node that is alive, by node id. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """One order to one loader."""

    loader_address: str
    version: vocabulary_pb2.ModelVersion
    target: "vocabulary_pb2.Tier.ValueType" = vocabulary_pb2.TIER_DEVICE  # HOST, DISK: only bring the weights there


class NodeLoader(Protocol):
    """The loaders, for what an operator asks for by hand."""

    async def load(self, command: LoadCommand, *, timeout_ms: int) -> None:
        """Make a version ready. Raises CapacityExhausted, InvalidInput, Conflict, DeadlinePassed, Unavailable."""
        ...

    async def unload(self, command: LoadCommand, *, timeout_ms: int) -> bool:
        """Drain and unload; whether it was loaded. Raises Conflict, DeadlinePassed, Unavailable."""
        ...


class NodeMaintenance(Protocol):
    """The loaders, for taking a node out of service and back."""

    async def drain(self, loader_address: str, reason: str) -> None:
        """The node takes no new work from now on; what runs ends, then everything is unloaded. Idempotent.

        Returns once it has begun. Raises Unavailable."""
        ...

    async def resume(self, loader_address: str) -> None:
        """The node takes work again. Idempotent. Raises Unavailable."""
        ...


class UsageQueries(Protocol):
    """Metering's query interface."""

    async def usage(self, parameters: Mapping[str, str]) -> object:
        """What metering answers for these query parameters, as JSON values. Raises InvalidInput, Unavailable."""
        ...

"""What a node says of itself: the aggregate as the message that schedulers and operators read."""

from dataclasses import dataclass
from typing import Any

from roundhouse.clock import Clock
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.loader.domain.instance import State
from services.loader.domain.memory_ledger import MemoryLedger
from services.loader.operations.node import Node, Residence

STATES: "dict[State, vocabulary_pb2.InstanceState.ValueType]" = {
    State.STAGED: vocabulary_pb2.INSTANCE_STATE_STAGED,
    State.ADMITTING: vocabulary_pb2.INSTANCE_STATE_STAGING,
    State.STAGING: vocabulary_pb2.INSTANCE_STATE_STAGING,
    State.LOADING: vocabulary_pb2.INSTANCE_STATE_LOADING,
    State.READY: vocabulary_pb2.INSTANCE_STATE_READY,
    State.DRAINING: vocabulary_pb2.INSTANCE_STATE_DRAINING,
    State.UNLOADING: vocabulary_pb2.INSTANCE_STATE_UNLOADING,
    State.FAILED: vocabulary_pb2.INSTANCE_STATE_FAILED,
}
"""REGISTERED has none: the node has nothing of the version, so it is not listed."""

_UNLISTED = (State.REGISTERED, State.ADMITTING)


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while one loader process lives."""

    node_id: str
    incarnation: str
    pool: str
    role: "vocabulary_pb2.NodeRole.ValueType"
    triton_address: str
    loader_address: str
    kvstore_address: str
    device_count: int


def describe(node: Node, identity: Identity, sequence: int, clock: Clock) -> loading_pb2.NodeState:
    """The node now."""
    return loading_pb2.NodeState(
        node_id=identity.node_id,
        sequence=sequence,
        incarnation=identity.incarnation,
        sent_unix_ms=clock.now_ms(),
        pool=identity.pool,
        role=identity.role,
        accepting=node.accepting,
        unhealthy_reason=node.unhealthy_reason or ("the loader is stopping" if node.draining else ""),
        triton_grpc_address=identity.triton_address,
        loader_address=identity.loader_address,
        kvstore_address=identity.kvstore_address,
        tiers=[
            _tier(vocabulary_pb2.TIER_DEVICE, node.device),
            _tier(vocabulary_pb2.TIER_HOST, node.host),
            _tier(vocabulary_pb2.TIER_DISK, node.disk),
        ],
        instances=[
            describe_instance(home)
            for _, home in sorted(node.residences.items(), key=lambda item: item[0])
            if home.instance.state not in _UNLISTED
        ],
        device_count=identity.device_count,
    )


def describe_instance(home: Residence) -> loading_pb2.Instance:
    """One instance; its bytes are what it holds or will hold on the device."""
    instance = home.instance
    return loading_pb2.Instance(
        version=vocabulary_pb2.ModelVersion(model=instance.version.model, digest=instance.version.digest),
        state=STATES.get(instance.state, vocabulary_pb2.INSTANCE_STATE_UNSPECIFIED),
        triton_model_name=home.triton_name,
        generation=instance.generation,
        device_bytes=home.device_bytes,
        state_since_unix_ms=instance.since_ms,
        stage_ms=instance.stage_ms,
        load_ms=instance.load_ms,
        reason=instance.reason,
        retry_at_unix_ms=instance.retry_at_ms,
        slots=home.model.slots,
    )


def _tier(tier: "vocabulary_pb2.Tier.ValueType", ledger: MemoryLedger[Any]) -> vocabulary_pb2.TierBytes:
    return vocabulary_pb2.TierBytes(
        tier=tier, capacity=ledger.capacity, resident=ledger.resident, reserved=ledger.reserved
    )

"""What a node says of itself: the aggregate as the message that schedulers and operators read."""

from dataclasses import dataclass

from roundhouse.clock import Clock
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.loader.domain.contents import ContentLedger
from services.loader.domain.device_ledger import DeviceLedger
from services.loader.domain.devices import Device
from services.loader.domain.instance import State
from services.loader.domain.rates import Way
from services.loader.operations.node import Node, Residence
from services.loader.operations.progress import ProgressGauge

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

MISFITS_TOLD = 20  # a guess: enough to see what is wrong; the state goes out twice a second
_UNLISTED = (State.REGISTERED, State.ADMITTING)
_NOT_PLACED = (State.STAGED, State.FAILED)


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


def describe(
    node: Node, identity: Identity, gauge: ProgressGauge, sequence: int, clock: Clock
) -> loading_pb2.NodeState:
    """The node now."""
    return loading_pb2.NodeState(
        node_id=identity.node_id,
        sequence=sequence,
        incarnation=identity.incarnation,
        sent_unix_ms=clock.now_ms(),
        pool=identity.pool,
        role=identity.role,
        accepting=node.accepting,
        emptying=bool(node.maintenance),
        unhealthy_reason=node.not_accepting_reason,
        triton_grpc_address=identity.triton_address,
        loader_address=identity.loader_address,
        kvstore_address=identity.kvstore_address,
        tiers=[
            _tier(vocabulary_pb2.TIER_DEVICE, node.device),
            _tier(vocabulary_pb2.TIER_HOST, node.host.ledger, node.rates.bytes_per_second(Way.TO_DEVICE)),
            _tier(vocabulary_pb2.TIER_DISK, node.disk, node.rates.bytes_per_second(Way.TO_HOST)),
            vocabulary_pb2.TierBytes(
                tier=vocabulary_pb2.TIER_SOURCE, bytes_per_second=node.rates.bytes_per_second(Way.TO_DISK)
            ),
        ],
        instances=[
            describe_instance(node, home, gauge)
            for _, home in sorted(node.residences.items(), key=lambda item: item[0])
            if home.instance.state not in _UNLISTED
        ],
        device_count=len(node.device.devices),
        devices=[_device(node.device, each) for each in node.device.devices],
        adapters=_adapters(node),
    )


def _adapters(node: Node) -> loading_pb2.AdapterState:
    stock = node.adapters
    last = list(stock.misfits.values())[-MISFITS_TOLD:]
    return loading_pb2.AdapterState(
        on_disk=len(stock.declared & node.on_disk.keys()),
        in_host=len(stock.shelved),
        host_capacity=stock.host.capacity,
        host_resident=stock.host.resident,
        refused=[
            loading_pb2.RefusedAdapter(adapter=each.adapter, base=each.base.model, reason=each.reason) for each in last
        ],
    )


def describe_instance(node: Node, home: Residence, gauge: ProgressGauge) -> loading_pb2.Instance:
    """One instance; its bytes are what it holds or will hold on the device."""
    instance = home.instance
    progress = gauge.read(home) if instance.state in (State.STAGING, State.LOADING) else None
    return loading_pb2.Instance(
        version=vocabulary_pb2.ModelVersion(model=instance.version.model, digest=instance.version.digest),
        state=STATES.get(instance.state, vocabulary_pb2.INSTANCE_STATE_UNSPECIFIED),
        triton_model_name=home.triton_name,
        generation=instance.generation,
        device_bytes=home.device_bytes,
        state_since_unix_ms=instance.since_ms,
        stage_ms=instance.stage_ms,
        load_ms=instance.load_ms,
        reason="leaves for its new version" if home.leaving and instance.state is State.READY else instance.reason,
        retry_at_unix_ms=instance.retry_at_ms,
        slots=home.model.slots,
        tier=fastest_tier(node, home),
        estimated_remaining_ms=(progress.remaining_ms or 0) if progress else 0,
        bytes_done=progress.bytes_done if progress else 0,
        bytes_total=progress.bytes_total if progress else 0,
        measured_bytes=home.measured_bytes,
        devices=() if instance.state in _NOT_PLACED else home.site,
    )


def _device(ledger: DeviceLedger, device: Device) -> loading_pb2.Device:
    return loading_pb2.Device(
        index=device.index,
        uuid=device.uuid,
        capacity=device.capacity,
        resident=ledger.resident_on(device.index),
        reserved=ledger.ledgers[device.index].reserved,
        link_group=device.link_group,
        mig=device.is_slice,
        profile=device.profile,
        unaccounted=ledger.unaccounted.get(device.index, 0),
    )


def _tier(
    tier: "vocabulary_pb2.Tier.ValueType", ledger: DeviceLedger | ContentLedger, bytes_per_second: int = 0
) -> vocabulary_pb2.TierBytes:
    return vocabulary_pb2.TierBytes(
        tier=tier,
        capacity=ledger.capacity,
        resident=ledger.resident,
        reserved=ledger.reserved,
        bytes_per_second=bytes_per_second,
    )


def fastest_tier(node: Node, home: Residence) -> "vocabulary_pb2.Tier.ValueType":
    """Where all of the version's bytes are that is nearest to the device."""
    digest = home.instance.version.digest
    if home.instance.state in (State.READY, State.DRAINING):
        return vocabulary_pb2.TIER_DEVICE
    if node.host.ledger.is_whole(digest):
        return vocabulary_pb2.TIER_HOST
    if node.disk.is_whole(digest):
        return vocabulary_pb2.TIER_DISK
    return vocabulary_pb2.TIER_UNSPECIFIED

"""What this process has heard of nodes: the newest state of each, and who has gone silent.

A node that said nothing for `STALE_MS`, or says that it does not accept work, is unhealthy and left out of placement
and grants; its running leases go on, because gateways stream without us (invariant 18).
"""

from collections.abc import Callable
from dataclasses import dataclass

from roundhouse.clock import Clock
from roundhouse.vocabulary import NodeId, PoolName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.scheduler.domain.nodes import InstanceView, NodeView, Residence
from services.scheduler.domain.records import version_key

STALE_MS = 3_000  # three missed periods of a loader
FORGET_MS = 60_000  # a silent node is forgotten after this; its last state is of no use any more

_RESIDENCES: "dict[vocabulary_pb2.InstanceState.ValueType, Residence]" = {
    vocabulary_pb2.INSTANCE_STATE_STAGING: Residence.STAGING,
    vocabulary_pb2.INSTANCE_STATE_STAGED: Residence.STAGED,
    vocabulary_pb2.INSTANCE_STATE_LOADING: Residence.LOADING,
    vocabulary_pb2.INSTANCE_STATE_READY: Residence.READY,
    vocabulary_pb2.INSTANCE_STATE_DRAINING: Residence.DRAINING,
    vocabulary_pb2.INSTANCE_STATE_UNLOADING: Residence.UNLOADING,
    vocabulary_pb2.INSTANCE_STATE_FAILED: Residence.FAILED,
}


@dataclass(frozen=True, slots=True)
class _Heard:
    state: loading_pb2.NodeState
    view: NodeView  # with `healthy` as the node itself says
    heard_ms: int


class NodeRegistry:
    """The nodes of all pools. `listen` gets the pool of every state that changed something for the queues."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[NodeId, _Heard] = {}
        self._listeners: list[Callable[[PoolName], None]] = []

    def listen(self, listener: Callable[[PoolName], None]) -> None:
        """Call `listener(pool)` after each state that differs from the one before in more than its time."""
        self._listeners.append(listener)

    def observe(self, state: loading_pb2.NodeState) -> None:
        """Take a state in. Older ones of the same loader process, and late ones of an earlier process, are ignored."""
        node_id = NodeId(state.node_id)
        before = self._heard.get(node_id)
        if before is not None and not _is_newer(state, before.state):
            return
        now_ms = self._clock.now_ms()
        heard = _Heard(state, _view(state), now_ms)
        self._heard[node_id] = heard
        if before is None or before.view != heard.view or now_ms - before.heard_ms > STALE_MS:
            for listener in self._listeners:
                listener(heard.view.pool)

    def seed(self, state: loading_pb2.NodeState) -> None:
        """Take a stored state in, as old as it is; live states win."""
        node_id = NodeId(state.node_id)
        if node_id not in self._heard:
            heard_ms = min(state.sent_unix_ms, self._clock.now_ms())
            self._heard[node_id] = _Heard(state, _view(state), heard_ms)

    def nodes(self, pool: PoolName) -> tuple[NodeView, ...]:
        """The nodes of a pool, by id."""
        now_ms = self._clock.now_ms()
        self._forget(now_ms)
        return tuple(_with_health(heard, now_ms) for _, heard in sorted(self._heard.items()) if heard.view.pool == pool)

    def pools(self) -> set[PoolName]:
        """Pools that have a node."""
        return {heard.view.pool for heard in self._heard.values()}

    def state(self, node_id: NodeId) -> loading_pb2.NodeState | None:
        """What a node said last: its addresses."""
        heard = self._heard.get(node_id)
        return heard.state if heard else None

    def heard_since(self, node_id: NodeId, time_ms: int) -> bool:
        """Whether a state of the node came after `time_ms`."""
        heard = self._heard.get(node_id)
        return heard is not None and heard.heard_ms > time_ms

    @property
    def any_healthy(self) -> bool:
        """Whether some node takes work."""
        now_ms = self._clock.now_ms()
        return any(_with_health(heard, now_ms).healthy for heard in self._heard.values())

    def _forget(self, now_ms: int) -> None:
        for node_id in [each for each, heard in self._heard.items() if now_ms - heard.heard_ms > FORGET_MS]:
            del self._heard[node_id]


def _is_newer(state: loading_pb2.NodeState, known: loading_pb2.NodeState) -> bool:
    if state.incarnation == known.incarnation:
        return state.sequence > known.sequence
    return state.sent_unix_ms >= known.sent_unix_ms


def _with_health(heard: _Heard, now_ms: int) -> NodeView:
    view = heard.view
    if not view.healthy or now_ms - heard.heard_ms < STALE_MS:
        return view
    return NodeView(view.node_id, view.pool, False, view.device_capacity, view.device_free, view.instances)


def _view(state: loading_pb2.NodeState) -> NodeView:
    device = next((tier for tier in state.tiers if tier.tier == vocabulary_pb2.TIER_DEVICE), None)
    capacity = device.capacity if device else 0
    free = capacity - device.resident - device.reserved if device else 0
    instances = (_instance(each) for each in state.instances if each.state in _RESIDENCES)
    return NodeView(
        NodeId(state.node_id), PoolName(state.pool), state.accepting, capacity, max(0, free), tuple(instances)
    )


def _instance(message: loading_pb2.Instance) -> InstanceView:
    return InstanceView(
        version=version_key(message.version.model, message.version.digest),
        residence=_RESIDENCES[message.state],
        device_bytes=message.device_bytes,
        slots=message.slots,
        since_ms=message.state_since_unix_ms,
        stage_ms=message.stage_ms,
        load_ms=message.load_ms,
        reason=message.reason,
        retry_at_ms=message.retry_at_unix_ms,
    )

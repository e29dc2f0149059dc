"""What this process has heard of nodes: the newest state of each, and who has gone silent.

A node that said nothing for `STALE_MS`, or says that it does not accept work, is unhealthy and left out of placement
and grants within two seconds; its running leases go on, because gateways stream without us (invariant 18). Requests
for what only a silent node has are still queued for `GRACE_MS`: a loader that restarts costs no refusals.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from roundhouse.clock import Clock
from roundhouse.vocabulary import NodeId, PoolName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.scheduler.domain.nodes import DeviceView, InstanceView, NodeView, Residence, Role, Tier
from services.scheduler.domain.records import VersionKey, version_key

STALE_MS = 1_800  # three missed periods of a loader (0.5 s) and a margin; noticed within 2 s (see `Pools.view`)
GRACE_MS = 10_000  # a guess: a loader restarts in less, and a gateway's client waits that long
SUSPECT_MS = 2_000  # a loader finds its dead Triton within this
STARTS_MOST = 10_000  # versions whose last start is remembered
SLEPT_MS = 1_000  # this process ran nothing for so long: it was frozen, or its machine was; four missed ticks
DAZED_MS = 2_000  # how long it then waits at most for a node's fresh word: two periods
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
_ROLES: "dict[vocabulary_pb2.NodeRole.ValueType, Role]" = {
    vocabulary_pb2.NODE_ROLE_PREFILL: Role.PREFILL,
    vocabulary_pb2.NODE_ROLE_DECODE: Role.DECODE,
}
_TIERS: "dict[vocabulary_pb2.Tier.ValueType, Tier]" = {
    vocabulary_pb2.TIER_SOURCE: Tier.SOURCE,
    vocabulary_pb2.TIER_DISK: Tier.DISK,
    vocabulary_pb2.TIER_HOST: Tier.HOST,
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
        self.starts_ms: dict[VersionKey, int] = {}
        """What the last start of a version took on whichever node, without staging."""
        self.revision = 0
        """Rises with every state that changed a view."""
        self._suspect_until_ms: dict[NodeId, int] = {}
        self._awake_ms = 0
        self._woke_ms = -DAZED_MS
        self._fresh = True

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
        self._fresh = self._fresh or state.sent_unix_ms >= self._woke_ms - SLEPT_MS
        heard = _Heard(state, _view(state), now_ms)
        self._heard[node_id] = heard
        if before is None or before.view != heard.view or now_ms - before.heard_ms > STALE_MS:
            self.revision += 1
            self._note_starts(heard.view)
            for listener in self._listeners:
                listener(heard.view.pool)

    def lost(self, node_id: NodeId) -> None:
        """A gateway has lost a node: leave it out for a moment, in which its loader would say so too."""
        if node_id in self._heard:
            self._suspect_until_ms[node_id] = self._clock.now_ms() + SUSPECT_MS
            self.revision += 1

    def note_awake(self) -> None:
        """This process runs. To be called several times a second: a long pause between two calls means it slept."""
        now_ms = self._clock.now_ms()
        if self._awake_ms and now_ms - self._awake_ms > SLEPT_MS:
            self._woke_ms, self._fresh = now_ms, False
        self._awake_ms = now_ms

    @property
    def dazed(self) -> bool:
        """Whether this process has just woken and has heard nothing new yet: silence says nothing about nodes then."""
        now_ms = self._clock.now_ms()
        if self._awake_ms and now_ms - self._awake_ms > SLEPT_MS:
            return True
        return not self._fresh and now_ms - self._woke_ms < DAZED_MS

    def seed(self, state: loading_pb2.NodeState) -> None:
        """Take a stored state in, as old as it is; live states win."""
        node_id = NodeId(state.node_id)
        if node_id not in self._heard:
            heard_ms = min(state.sent_unix_ms, self._clock.now_ms())
            self._heard[node_id] = _Heard(state, _view(state), heard_ms)
            self.revision += 1
            self._note_starts(self._heard[node_id].view)

    def nodes(self, pool: PoolName) -> tuple[NodeView, ...]:
        """The nodes of a pool, by id."""
        now_ms = self._clock.now_ms()
        self._forget(now_ms)
        return tuple(
            self._with_health(heard, now_ms) for _, heard in sorted(self._heard.items()) if heard.view.pool == pool
        )

    def pools(self) -> set[PoolName]:
        """Pools that have a node."""
        return {heard.view.pool for heard in self._heard.values()}

    def state(self, node_id: NodeId) -> loading_pb2.NodeState | None:
        """What a node said last: its addresses."""
        heard = self._heard.get(node_id)
        return heard.state if heard else None

    def instance(self, node_id: NodeId, version: VersionKey) -> InstanceView | None:
        """What a node said last of a version, whoever it has it for."""
        heard = self._heard.get(node_id)
        return heard.view.find_any(version) if heard else None

    def heard_since(self, node_id: NodeId, time_ms: int) -> bool:
        """Whether a state of the node came after `time_ms`."""
        heard = self._heard.get(node_id)
        return heard is not None and heard.heard_ms > time_ms

    @property
    def any_present(self) -> bool:
        """Whether some node spoke lately, in service or not: with all nodes drained a scheduler is as well as ever."""
        now_ms = self._clock.now_ms()
        return any(now_ms - heard.heard_ms < STALE_MS for heard in self._heard.values())

    @property
    def any_healthy(self) -> bool:
        """Whether some node takes work."""
        now_ms = self._clock.now_ms()
        return any(self._with_health(heard, now_ms).healthy for heard in self._heard.values())

    def _with_health(self, heard: _Heard, now_ms: int) -> NodeView:
        view = heard.view
        suspect = self._suspect_until_ms.get(view.node_id, 0) > now_ms
        if not view.healthy or (not suspect and now_ms - heard.heard_ms < STALE_MS):
            return view
        return replace(view, healthy=False, quiet=now_ms - heard.heard_ms < GRACE_MS)

    def _note_starts(self, node: NodeView) -> None:
        for each in node.instances:
            if each.load_ms:
                self.starts_ms.pop(each.version, None)
                self.starts_ms[each.version] = each.load_ms
        while len(self.starts_ms) > STARTS_MOST:
            del self.starts_ms[next(iter(self.starts_ms))]

    def _forget(self, now_ms: int) -> None:
        for node_id in [each for each, heard in self._heard.items() if now_ms - heard.heard_ms > FORGET_MS]:
            del self._heard[node_id]
            self._suspect_until_ms.pop(node_id, None)


def _is_newer(state: loading_pb2.NodeState, known: loading_pb2.NodeState) -> bool:
    if state.incarnation == known.incarnation:
        return state.sequence > known.sequence
    return state.sent_unix_ms >= known.sent_unix_ms


def _view(state: loading_pb2.NodeState) -> NodeView:
    device = next((tier for tier in state.tiers if tier.tier == vocabulary_pb2.TIER_DEVICE), None)
    capacity = device.capacity if device else 0
    free = capacity - device.resident - device.reserved if device else 0
    instances = (_instance(each) for each in state.instances if each.state in _RESIDENCES)
    return NodeView(
        node_id=NodeId(state.node_id),
        pool=PoolName(state.pool),
        healthy=state.accepting,
        device_capacity=capacity,
        device_free=max(0, free),
        instances=tuple(instances),
        role=_ROLES.get(state.role, Role.MIXED),
        devices=tuple(_device(each) for each in state.devices),
        speeds=tuple(
            (_TIERS[tier.tier], speed)
            for tier in state.tiers
            if tier.tier in _TIERS and (speed := _rounded(tier.bytes_per_second // 1_000))
        ),
    )


def _device(message: loading_pb2.Device) -> DeviceView:
    free = message.capacity - message.resident - message.reserved
    return DeviceView(message.index, message.capacity, max(0, free), message.link_group, message.mig)


def _rounded(bytes_per_ms: int) -> int:
    """To two digits: a measurement that wobbles is no change that anybody must hear of."""
    if bytes_per_ms < 100:
        return bytes_per_ms
    step: int = 10 ** (len(str(bytes_per_ms)) - 2)
    return bytes_per_ms // step * step


def _instance(message: loading_pb2.Instance) -> InstanceView:
    return InstanceView(
        version=version_key(message.version.model, message.version.digest),
        residence=_residence(message),
        device_bytes=message.device_bytes,
        slots=message.slots,
        since_ms=message.state_since_unix_ms,
        stage_ms=message.stage_ms,
        load_ms=message.load_ms,
        reason=message.reason,
        retry_at_ms=message.retry_at_unix_ms,
        devices=tuple(message.devices),
        tier=_TIERS.get(message.tier, Tier.DISK),  # whatever a loader lists went through its disk
        remaining_ms=message.estimated_remaining_ms,
    )


def _residence(message: loading_pb2.Instance) -> Residence:
    """Ready with a reason is about to leave: nothing new goes there, and nobody unloads it a second time."""
    if message.state == vocabulary_pb2.INSTANCE_STATE_READY and message.reason:
        return Residence.DRAINING
    return _RESIDENCES[message.state]

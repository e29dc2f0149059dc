"""Keeps the directory of the other nodes: who lives, from node states; who has what, from block events.

After a gap in a node's events, a restart of it, or a silence, its keys are asked for again as a whole. All of it is a
hint: losing it costs time, never correctness.
"""

import asyncio

import structlog
from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.clock import Clock
from roundhouse.event_bus import EventBus, Message, Subscription
from roundhouse.wire.v1 import kv_pb2, loading_pb2
from services.kvstore.domain.peer_directory import PREFIX_BYTES, PeerDirectory
from services.kvstore.ports import PeerFault, PeerTransport

log = structlog.get_logger(__name__)

SILENT_MS = 15_000  # node states come every second; as the TTL of the bucket of node states
SNAPSHOT_MS_MAX = 5_000  # 8 MB for a million blocks
RETRY_MS = 2_000  # after a snapshot that failed


class PeerFollower:
    """Follows the bus on behalf of one node."""

    def __init__(self, directory: PeerDirectory, transport: PeerTransport, clock: Clock) -> None:
        """Call `start` once the bus is there, and `mend` regularly."""
        self._directory, self._transport, self._clock = directory, transport, clock
        self._subscriptions: list[Subscription] = []
        self._not_before_ms: dict[str, int] = {}

    async def start(self, bus: EventBus) -> None:
        """Begin to listen."""
        self._subscriptions.append(await bus.subscribe(subjects.NODE_STATES, self._hear_state))
        self._subscriptions.append(await bus.subscribe(subjects.KV_BLOCKS, self._hear_blocks))

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        for subscription in self._subscriptions:
            await subscription.stop()
        self._subscriptions.clear()

    async def mend(self) -> None:
        """Forget nodes that are silent; ask those for a snapshot whose events have a gap."""
        now_ms = self._clock.monotonic_ms()
        self._directory.forget_silent(now_ms - SILENT_MS)
        due = [node for node in self._directory.lost() if self._not_before_ms.get(node[0], 0) <= now_ms]
        self._not_before_ms = {node: until for node, until in self._not_before_ms.items() if until > now_ms}
        await asyncio.gather(*(self._take_snapshot(node_id, address) for node_id, address in due))

    async def _take_snapshot(self, node_id: str, address: str) -> None:
        self._not_before_ms[node_id] = self._clock.monotonic_ms() + RETRY_MS
        try:
            found = await self._transport.snapshot(address, PREFIX_BYTES, timeout_ms=SNAPSHOT_MS_MAX)
        except PeerFault as fault:
            log.info("no_snapshot", peer=address, text=str(fault))
            return
        if found.node_id == node_id:
            self._directory.snapshot(node_id, found.incarnation, found.sequence, found.keys)

    async def _hear_state(self, message: Message) -> None:
        try:
            state = loading_pb2.NodeState.FromString(message.data)
        except DecodeError:
            return
        self._directory.node_seen(state.node_id, state.kvstore_address, self._clock.monotonic_ms())

    async def _hear_blocks(self, message: Message) -> None:
        try:
            event = kv_pb2.BlockEvents.FromString(message.data)
        except DecodeError:
            return
        self._directory.heard(event.node_id, event.incarnation, event.sequence, event.stored, event.dropped)

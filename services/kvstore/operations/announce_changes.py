"""Tells the schedulers which blocks this node has, for prefix-aware placement.

Best effort: a message that the bus does not take is lost, and the gap in `sequence` says so; when nothing changes, the
last sequence is repeated every few seconds, so that the loss of the last message is noticed too. Who noticed asks for a
snapshot. Placement by a stale list costs time, never correctness, because every lookup asks the table.
"""

from collections.abc import Iterator, Sequence

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.domain.records import Changes

KEYS_A_MESSAGE = 8_192  # 32 bytes each and framing: under 300 KB of NATS's 1 MB


class ChangeAnnouncer:
    """Numbers and sends the changes of one process."""

    def __init__(self, node_id: str, incarnation: str) -> None:
        """`incarnation` tells a follower that a new process knows nothing of the old one's blocks."""
        self._node_id = node_id
        self._incarnation = incarnation
        self._sequence = 0

    @property
    def node_id(self) -> str:
        """Whose changes these are."""
        return self._node_id

    @property
    def sequence(self) -> int:
        """Of the last message with changes; 0 before the first."""
        return self._sequence

    async def repeat(self, bus: EventBus | None) -> None:
        """Say how far the sequence is."""
        event = kv_pb2.BlockEvents(node_id=self._node_id, incarnation=self._incarnation, sequence=self._sequence)
        await _sent(bus, subjects.kv_blocks(self._node_id), event.SerializeToString())

    async def announce(self, changes: Changes, bus: EventBus | None) -> int:
        """Send `changes` in order, dropped before stored; returns how many messages were lost."""
        lost = 0
        for dropped, stored in _batches(_net(changes)):
            self._sequence += 1
            event = kv_pb2.BlockEvents(
                node_id=self._node_id,
                incarnation=self._incarnation,
                sequence=self._sequence,
                stored=stored,
                dropped=dropped,
            )
            lost += not await _sent(bus, subjects.kv_blocks(self._node_id), event.SerializeToString())
        return lost


async def _sent(bus: EventBus | None, subject: str, data: bytes) -> bool:
    if bus is None or not bus.connected:
        return False
    try:
        await bus.publish(subject, data)
    except Unavailable:
        return False
    return True


def _net(changes: Changes) -> Changes:
    """Only the last word on each key counts: it is stored if it came more often than it went, or as often."""
    balance: dict[bytes, int] = {}
    for key in changes.stored:
        balance[key] = balance.get(key, 0) + 1
    for key in changes.dropped:
        balance[key] = balance.get(key, 0) - 1
    stored = tuple(key for key, count in balance.items() if count > 0)
    return Changes(stored, tuple(key for key, count in balance.items() if count < 0))


def _batches(changes: Changes) -> Iterator[tuple[Sequence[bytes], Sequence[bytes]]]:
    for start in range(0, len(changes.dropped), KEYS_A_MESSAGE):
        yield changes.dropped[start : start + KEYS_A_MESSAGE], ()
    for start in range(0, len(changes.stored), KEYS_A_MESSAGE):
        yield (), changes.stored[start : start + KEYS_A_MESSAGE]

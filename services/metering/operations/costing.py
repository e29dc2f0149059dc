"""Watches which nodes are there, and reports what they cost.

Every metering process hears every node; what each saw is merged, so it does not matter how many there are. A process
that dies loses at most what it saw since it last noted it.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from roundhouse.event_bus import Message
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.metering.domain.costs import SLOT_MS, CostReport, NodeHour, cost_report
from services.metering.domain.periods import HOUR_MS, hour_start_ms
from services.metering.money_ports import NodeHours

NOTE_EVERY_MS: Final = 10_000
_LOADING: Final = frozenset({vocabulary_pb2.INSTANCE_STATE_STAGING, vocabulary_pb2.INSTANCE_STATE_LOADING})


class NodeWatch:
    """A handler of node states, and a turn for `Lifecycle.every` that notes what was seen."""

    def __init__(self, store: NodeHours) -> None:
        self._store = store
        self._seen: dict[tuple[int, str, str], NodeHour] = {}

    async def on_state(self, message: Message) -> None:
        """One state of one node."""
        state = loading_pb2.NodeState.FromString(message.data)
        hour = sighting(state)
        key = (hour.hour_ms, hour.node_id, hour.pool)
        known = self._seen.get(key)
        self._seen[key] = hour if known is None else known.merged(hour)

    async def turn(self) -> None:
        """Note what was seen since the last turn. Raises Unavailable; then it is noted with the next turn."""
        noted, self._seen = self._seen, {}
        if not noted:
            return
        try:
            await self._store.merge(list(noted.values()))
        except BaseException:
            for key, hour in noted.items():
                later = self._seen.get(key)
                self._seen[key] = hour if later is None else later.merged(hour)
            raise


def sighting(state: loading_pb2.NodeState) -> NodeHour:
    """One state as a set bit."""
    hour_ms = hour_start_ms(state.sent_unix_ms)
    bit = 1 << ((state.sent_unix_ms - hour_ms) // SLOT_MS)
    loading = any(instance.state in _LOADING for instance in state.instances)
    return NodeHour(hour_ms, state.node_id, state.pool, bit, bit if loading else 0, max(1, state.device_count))


async def costs_between(store: NodeHours, from_ms: int, to_ms: int, rates: Mapping[str, Decimal]) -> CostReport:
    """The report over whole hours: from the one that holds `from_ms` to the one that ends at or after `to_ms`."""
    hours, uses = await store.between(hour_start_ms(from_ms), hour_start_ms(to_ms + HOUR_MS - 1))
    return cost_report(hours, uses, rates)

"""Tells the mesh what the node has: at once on every change, and twice a second in any case.

Changes that come together are told together. Publishing and keeping are separate tasks, so a slow key-value store
delays no announcement. What cannot be told is told again within a second.
"""

import asyncio
import contextlib
from dataclasses import replace

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.wire.v1 import loading_pb2
from services.loader.operations.describe import Identity, describe
from services.loader.operations.node import Changes, Node
from services.loader.operations.progress import ProgressGauge
from services.loader.ports import Measurements, StateSink

log = structlog.get_logger(__name__)

PERIOD_MS = 500  # schedulers leave a node out that was silent for three of these and a margin: within 2 s


class Announcer:
    """Two loops: `publish_states` and `keep_states`. Both end only by cancellation."""

    def __init__(
        self,
        node: Node,
        identity: Identity,
        gauge: ProgressGauge,
        sink: StateSink,
        measurements: Measurements,
        clock: Clock,
    ) -> None:
        self._node = node
        self._identity = identity
        self._gauge = gauge
        self._sink = sink
        self._measurements = measurements
        self._clock = clock
        self._sequence = 0
        self._latest: loading_pb2.NodeState | None = None
        self._new = Changes()

    def reached_at(self, loader_address: str) -> None:
        """Under which address this loader takes orders. Call once, before the first state is published."""
        self._identity = replace(self._identity, loader_address=loader_address)

    async def publish_states(self) -> None:
        """Publish on change and each `PERIOD_MS`."""
        while True:
            changed = self._node.changes.next()
            await self.publish_now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_MS / 1000):
                    await changed.wait()

    async def keep_states(self) -> None:
        """Keep the newest published state."""
        while True:
            new = self._new.next()
            if self._latest is not None:
                await self._keep(self._latest)
            await new.wait()

    async def publish_now(self) -> loading_pb2.NodeState:
        """Publish the state as it is now; returns it. Raises nothing that is expected."""
        state = self.current()
        self._measurements.tiers(state)
        self._measurements.moving(*self._gauge.moving())
        try:
            await self._sink.publish(state)
        except Unavailable as error:
            log.warning("node_state_not_published", reason=error.message)
        self._latest = state
        self._new.notify()
        return state

    def current(self) -> loading_pb2.NodeState:
        """The state as it is now, under a sequence number of its own."""
        self._sequence += 1
        return describe(self._node, self._identity, self._gauge, self._sequence, self._clock)

    async def _keep(self, state: loading_pb2.NodeState) -> None:
        try:
            await self._sink.keep(state)
        except Unavailable as error:
            log.warning("node_state_not_kept", reason=error.message)

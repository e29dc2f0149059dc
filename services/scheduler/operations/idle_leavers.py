"""Tells loaders which of their leaving instances nobody uses any more.

Triton sometimes never lets go of a model whose streams have all ended. Its loader cannot tell that from a long stream,
and would wait for minutes; here it is known who holds a place. Nothing is unloaded by this: what leaves already,
whoever ordered it, is ended sooner. Any replica may say it, any number of times. Decision: docs/decisions/0168.
"""

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import RoundhouseError
from services.scheduler.domain.nodes import LEAVING, InstanceView, NodeView
from services.scheduler.domain.records import InstanceKey, instance_key, model_of
from services.scheduler.operations.orders import unload_order
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import LoaderFleet

log = structlog.get_logger(__name__)

IDLE_MS = 10_000  # a lease's time: a stream whose gateway is only late with its heartbeat is not taken for none
TELL_MS = 2_000  # the loader answers at once
REASON = "idle"


class IdleLeavers:
    """One process's watch over all pools. `turn` runs each second."""

    def __init__(self, pools: Pools, loaders: LoaderFleet, clock: Clock) -> None:
        self._pools = pools
        self._loaders = loaders
        self._clock = clock
        self._unused_ms: dict[InstanceKey, int] = {}  # since when each was seen leaving without anybody on it

    async def turn(self) -> None:
        """Look at every instance that leaves; a loader that cannot be told is told at a later turn."""
        now_ms, before = self._clock.monotonic_ms(), self._unused_ms
        self._unused_ms = {}
        for pool in sorted(self._pools.names()):
            view = self._pools.view(pool)
            for node in view.nodes:
                for each in node.instances:
                    key = instance_key(node.node_id, each.version)
                    if each.residence not in LEAVING or view.state.in_use.get(key):
                        continue
                    self._unused_ms[key] = before.get(key, now_ms)
                    if now_ms - self._unused_ms[key] >= IDLE_MS:
                        self._unused_ms[key] = now_ms
                        await self._tell(node, each)

    async def _tell(self, node: NodeView, instance: InstanceView) -> None:
        state = self._pools.nodes.state(node.node_id)
        if state is None:
            return
        order = unload_order(instance.version, self._clock.now_ms(), deadline_ms=TELL_MS, reason=REASON)
        log.info("nobody_uses_what_leaves", node=node.node_id, model=model_of(instance.version))
        try:
            await self._loaders.ensure_unloaded(state.loader_address, order)
        except RoundhouseError as error:
            log.info("loader_not_told", node=node.node_id, reason=error.message)

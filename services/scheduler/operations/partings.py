"""Unloads of instances that cannot change hands: a version stands for others, and one of the two owners is to be alone.

A node holds a version once, so it leaves and is loaded anew, on other devices. The plan says which, when they have had
their time; here the instance is closed, its requests end, it is unloaded, and the mark goes when the node says it is
gone. All of it is repeated by later plans, of any replica, until it is done; a command that was sent is not taken back.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import RoundhouseError, Unavailable
from roundhouse.vocabulary import NodeId, PoolName
from services.scheduler.domain.plans import Parting
from services.scheduler.domain.records import Draining, InstanceKey, model_of
from services.scheduler.domain.residency import DrainOrder
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.keyed_tasks import KeyedTasks
from services.scheduler.operations.orders import unload_order
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import LoaderFleet, SchedulingStore

log = structlog.get_logger(__name__)

HOLD_MS = 15_000  # as the marks of loads
UNLOAD_MS = 10_000  # well within `HOLD_MS`; confirmed unloads take under a second
GONE_LOOKS, LOOK_MS = 40, 50  # for the node's next state: four of its periods
REASON = "apart"


class Partings:
    """Those of one process. One task an instance."""

    def __init__(
        self, store: SchedulingStore, pools: Pools, loaders: LoaderFleet, dispatcher: Dispatcher, clock: Clock
    ) -> None:
        self._store = store
        self._pools = pools
        self._loaders = loaders
        self._dispatcher = dispatcher
        self._clock = clock
        self._unloading: KeyedTasks[InstanceKey] = KeyedTasks("parting")

    async def go_on(self, pool: PoolName, partings: Sequence[Parting]) -> None:
        """Close what is to leave, and unload what runs nothing any more. Raises Unavailable (the store)."""
        for parting in partings:
            key = parting.victim.instance
            if key not in self._unloading and await self._is_quiet(pool, parting):
                self._unloading.begin(key, partial(self._unload, pool, parting))

    async def stop(self) -> None:
        """Follow no longer; what was sent goes on at its loader."""
        await self._unloading.stop()

    async def _is_quiet(self, pool: PoolName, parting: Parting) -> bool:
        """Close it for new requests; whether none runs, in the same step (invariant 8)."""
        now_ms = self._clock.now_ms()
        victim = parting.victim
        order = DrainOrder(victim.instance, victim.version, parting.purpose, now_ms + HOLD_MS, rotate=True)
        answer = await self._store.begin_drain(pool, order, now_ms)
        return isinstance(answer, Draining) and answer.in_use == 0

    async def _unload(self, pool: PoolName, parting: Parting) -> None:
        try:
            if await self._send(pool, parting):
                for _ in range(GONE_LOOKS):
                    if not self._pools.is_ready(parting.node_id, parting.victim.version):
                        break
                    await self._clock.sleep_ms(LOOK_MS)
        except RoundhouseError as error:
            log.info("parting_failed", model=model_of(parting.victim.version), reason=error.message)
        with suppress(Unavailable):  # then the mark ends by itself
            await self._store.clear_drain(pool, parting.victim.instance, self._clock.now_ms(), parting.purpose)
        self._dispatcher.wake(pool)

    async def _send(self, pool: PoolName, parting: Parting) -> bool:
        state, now_ms = self._pools.nodes.state(NodeId(parting.node_id)), self._clock.now_ms()
        victim = parting.victim
        sent = await self._store.send_drains(pool, parting.purpose, [victim.instance], now_ms + HOLD_MS, now_ms)
        if state is None or not sent:
            return False
        request = unload_order(victim.version, now_ms, deadline_ms=UNLOAD_MS, reason=REASON)
        log.info("parting", model=model_of(victim.version), node=parting.node_id)
        await self._loaders.ensure_unloaded(state.loader_address, request)
        return True

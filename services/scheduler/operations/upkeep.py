"""What time alone brings: deadlines in the queue, leases past their end, messages that nobody acknowledged.

Every replica does it for every pool; the scripts make each expiry happen once.
"""

import asyncio
from contextlib import suppress

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Outcome, PoolName
from services.scheduler.operations.broken import BrokenInstances
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.pools import Pools
from services.scheduler.operations.residency import Residency
from services.scheduler.ports import Instruments, SchedulingStore

log = structlog.get_logger(__name__)

TICK_MS = 250  # a deadline is noticed at most this late: a quarter of the second that invariant 1 allows

GAP_MS = 10  # between two turns that events hurry: a burst of cold requests shares one plan


class Upkeep:
    """One turn for all pools each `TICK_MS`."""

    def __init__(
        self,
        store: SchedulingStore,
        pools: Pools,
        dispatcher: Dispatcher,
        residency: Residency,
        broken: BrokenInstances,
        clock: Clock,
        instruments: Instruments,
    ) -> None:
        self._store = store
        self._pools = pools
        self._dispatcher = dispatcher
        self._residency = residency
        self._broken = broken
        self._clock = clock
        self._instruments = instruments
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        """Do the next turn soon instead of at the next tick."""
        self._hurried.set()

    async def run(self) -> None:
        """Turn after turn until cancelled."""
        while True:
            await self.turn()
            await self._clock.sleep_ms(GAP_MS)
            with suppress(TimeoutError):
                async with asyncio.timeout((TICK_MS - GAP_MS) / 1000):
                    await self._hurried.wait()
            self._hurried.clear()

    async def turn(self) -> None:
        """Do what is due. A store that is away is tried again at the next turn."""
        self._pools.nodes.note_awake()
        for pool in sorted(self._pools.names()):
            try:
                await self._tend(pool)
            except Unavailable as error:
                log.warning("upkeep_failed", pool=pool, error=error.message)

    def _wake_idle_slots(self, pool: PoolName) -> None:
        """Give free slots to those who wait: the replica that was to do it may be gone (invariant 3)."""
        state = self._pools.view(pool).state
        waiting = {depth.version for depth in state.depths}
        for offer in self._pools.offers(pool, waiting) if waiting else []:
            if state.in_use.get(offer.instance, 0) < offer.slots and offer.instance not in state.drains:
                self._dispatcher.wake(pool, offer.version)

    async def _tend(self, pool: PoolName) -> None:
        expired = await self._store.expire(pool, self._clock.now_ms())
        self._dispatcher.deliver(pool, (*expired.refused, *expired.lapsed))
        for ticket in expired.lapsed:
            log.warning("lease_lapsed", attempt=ticket.attempt)
            self._instruments.ended(pool, Outcome.ABANDONED)
            self._dispatcher.wake(pool, ticket.version)
        self._wake_idle_slots(pool)
        await self._dispatcher.redeliver(pool)
        await self._residency.consider(pool)
        await self._broken.adopt(pool)

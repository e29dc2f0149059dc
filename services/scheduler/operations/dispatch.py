"""Hand free slots to waiting requests, and bring each grant or refusal to its gateway.

Every event that can free or need a slot calls `wake`; one loop turns wakes into `take` calls, so under load many events
share one script. A message that is not acknowledged stays in the store's outbox, and whichever replica finds it due
sends it again (`redeliver`): a crash between `take` and the gateway loses nothing (invariant 1).
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import GatewayId, Outcome, PoolName
from services.scheduler.domain.records import AttemptId, Ending, Standing, Ticket, VersionKey
from services.scheduler.operations import deliveries
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import GatewayLink, Instruments, SchedulingStore, UsageOutlet

log = structlog.get_logger(__name__)

TAKE_MAX = 64  # grants of one script: about a millisecond of the store's time
RETRY_MS = 200  # pause after the store did not answer
ALL = None


class Dispatcher:
    """The grant loop of one process, for all pools."""

    def __init__(
        self,
        store: SchedulingStore,
        pools: Pools,
        gateways: GatewayLink,
        usage: UsageOutlet,
        clock: Clock,
        instruments: Instruments,
        *,
        cluster: str,
    ) -> None:
        self._store = store
        self._pools = pools
        self._gateways = gateways
        self._usage = usage
        self._clock = clock
        self._instruments = instruments
        self._cluster = cluster
        self._dirty: dict[PoolName, set[VersionKey] | None] = {}
        self._woken = asyncio.Event()
        self._acknowledged: dict[PoolName, list[AttemptId]] = {}
        self._deliveries: set[asyncio.Task[None]] = set()
        self.on_granted: Callable[[PoolName, Ticket], None] = lambda pool, ticket: None
        """Called for each grant that this replica took."""
        self.on_cold: Callable[[], None] = lambda: None
        """Called when something is wanted that no instance serves, so that placement need not wait for its tick."""

    def wake(self, pool: PoolName, version: VersionKey | None = ALL) -> None:
        """A slot or a request of a version (None = of any) may have appeared."""
        dirty = self._dirty.get(pool, set())
        if version is None or dirty is None:
            self._dirty[pool] = None
        else:
            dirty.add(version)
            self._dirty[pool] = dirty
        self._woken.set()

    async def run(self) -> None:
        """Grant until cancelled; deliveries in flight are cancelled with it and made by another replica."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                await self._turn()
        finally:
            await self._drop_deliveries()

    async def _turn(self) -> None:
        while self._dirty:
            pool, versions = self._dirty.popitem()
            try:
                await self._grant(pool, versions)
            except Unavailable as error:
                log.warning("take_failed", pool=pool, error=error.message)
                self.wake(pool)
                await self._clock.sleep_ms(RETRY_MS)

    async def _grant(self, pool: PoolName, versions: set[VersionKey] | None) -> None:
        offers = self._pools.offers(pool, versions)
        if versions is None or not versions <= {offer.version for offer in offers}:
            self.on_cold()
        if not offers:
            return
        taken = await self._store.take(pool, offers, TAKE_MAX, self._clock.now_ms())
        if len(taken.granted) == TAKE_MAX:
            self.wake(pool)
        for ticket in taken.granted:
            self._instruments.granted(pool, ticket)
            self.on_granted(pool, ticket)
        self.deliver(pool, (*taken.granted, *taken.refused))

    def deliver(self, pool: PoolName, tickets: Iterable[Ticket]) -> None:
        """Send each message in a task of its own; what fails is due again later."""
        for ticket in tickets:
            if ticket.standing is Standing.REFUSED:
                self._instruments.refused(pool, ticket.reason)
            task = asyncio.create_task(self._deliver(pool, ticket), name="delivery")
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, pool: PoolName, ticket: Ticket) -> None:
        try:
            if ticket.standing is Standing.LAPSED:
                await self._usage.publish(deliveries.usage_event(ticket, self._cluster))
            else:
                await self._to_gateway(pool, ticket)
                return
        except Unavailable as error:
            log.info("delivery_waits", attempt=ticket.attempt, standing=ticket.standing, reason=error.message)
            return
        except ValueError as error:
            log.error("ticket_unreadable", attempt=ticket.attempt, error=str(error))
        self._acknowledge(pool, ticket.attempt)

    async def _to_gateway(self, pool: PoolName, ticket: Ticket) -> None:
        gateway_id = GatewayId(deliveries.request_of(ticket).gateway_id)
        message = deliveries.delivery(ticket, self._pools.catalogue.current)
        answer = await self._gateways.deliver(gateway_id, message)
        if ticket.standing is Standing.GRANTED and not answer.wanted:
            ending = Ending(ticket.attempt, Outcome.CANCELLED)  # its client left: the slot is free at once
            await self._store.finish(pool, [ending], self._clock.now_ms())
            self.wake(pool, ticket.version)
        else:
            self._acknowledge(pool, ticket.attempt)

    def _acknowledge(self, pool: PoolName, attempt: AttemptId) -> None:
        self._acknowledged.setdefault(pool, []).append(attempt)

    async def redeliver(self, pool: PoolName) -> None:
        """Note what arrived, then send again what is due. Raises Unavailable."""
        arrived = self._acknowledged.pop(pool, [])
        now_ms = self._clock.now_ms()
        if arrived:
            try:
                await self._store.acknowledge(pool, arrived, now_ms)
            except Unavailable:
                self._acknowledged.setdefault(pool, []).extend(arrived)
                raise
        self.deliver(pool, await self._store.claim_due(pool, now_ms))

    async def _drop_deliveries(self) -> None:
        for task in self._deliveries:
            task.cancel()
        await asyncio.gather(*self._deliveries, return_exceptions=True)

"""Hand free slots to waiting requests, and bring each grant or refusal to its gateway.

Every event that can free or need a slot is gathered; one loop a pool makes turns of what has been gathered: under load
many events share one script. A message that is not acknowledged stays in the store's outbox, and whichever replica
finds it due sends it again (`redeliver`): a crash between a turn and the gateway loses nothing (invariant 1).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import GatewayId, Outcome, PoolName
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Enqueued,
    Finish,
    QueueEntry,
    Room,
    Standing,
    Ticket,
    Turn,
    TurnDone,
    VersionKey,
)
from services.scheduler.operations import deliveries
from services.scheduler.operations.gathered import Gathered
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
        self._gathered: dict[PoolName, Gathered] = {}
        self._taking: set[PoolName] = set()  # pools that take their turns now
        self._woken = asyncio.Event()
        self._acknowledged: dict[PoolName, list[AttemptId]] = {}
        self._deliveries: set[asyncio.Task[None]] = set()
        self.on_granted: Callable[[PoolName, Ticket], None] = lambda pool, ticket: None
        """Called for each grant that this replica took."""
        self.on_cold: Callable[[], None] = lambda: None
        """Called when something is wanted that no instance serves, so that placement need not wait for its tick."""

    def wake(self, pool: PoolName, version: VersionKey | None = ALL) -> None:
        """A slot or a request of a version (None = of any) may have appeared."""
        self._gathered.setdefault(pool, Gathered()).note(version)
        self._woken.set()

    async def enqueue(self, pool: PoolName, entry: QueueEntry, room: Room) -> Enqueued:
        """Queue a request with the next turn, which grants it if a slot is free. Raises Unavailable.

        Cancelled: it may be queued or not; a `cancel` of the attempt makes sure."""
        answer: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()
        self.wake(pool, entry.version)
        self._gathered[pool].entries.append((entry, room, answer))
        return await answer

    async def finish(self, pool: PoolName, endings: Sequence[tuple[Ending, VersionKey | None]]) -> tuple[Finish, ...]:
        """Settle attempts with the next turn, which gives their slots away. Raises Unavailable.

        A version that the caller knows saves a turn; None = the store will say."""
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Finish]] = [loop.create_future() for _ in endings]
        gathered = self._gathered.setdefault(pool, Gathered())
        for (ending, version), answer in zip(endings, answers, strict=True):
            gathered.endings.append((ending, answer))
            if version is not None:
                gathered.note(version)
        self._woken.set()
        return tuple(await asyncio.gather(*answers))

    async def run(self) -> None:
        """Turn after turn until cancelled; deliveries in flight are cancelled with it and made by another replica.

        Each pool has its turns one after the other, and beside those of others: its part of the store may be away."""
        try:
            async with asyncio.TaskGroup() as turns:
                while True:
                    await self._woken.wait()
                    self._woken.clear()
                    for pool in [each for each in self._gathered if each not in self._taking]:
                        self._taking.add(pool)
                        turns.create_task(self._turns(pool), name="turns")
        finally:
            for gathered in self._gathered.values():
                gathered.fail(Unavailable("this replica stops"))
            await self._drop_deliveries()

    async def _turns(self, pool: PoolName) -> None:
        try:
            while (gathered := self._gathered.pop(pool, None)) is not None:
                await self._turn(pool, gathered)
        finally:
            self._taking.discard(pool)

    async def _turn(self, pool: PoolName, gathered: Gathered) -> None:
        rest = gathered.rest()
        if rest is not None:
            self._gathered[pool] = rest
        try:
            await self._take_turn(pool, gathered)
        except Unavailable as error:
            log.warning("turn_failed", pool=pool, error=error.message)
            gathered.fail(error)
            self._wake_all(pool, gathered.versions)
            await self._clock.sleep_ms(RETRY_MS)
        except BaseException:
            gathered.fail(Unavailable("this replica stops"))
            raise

    async def _take_turn(self, pool: PoolName, gathered: Gathered) -> None:
        versions = gathered.versions
        offers = self._pools.offers(pool, versions) if versions is None or versions else []
        if versions is None or not versions <= {offer.version for offer in offers}:
            self.on_cold()
        turn = gathered.turn(offers, TAKE_MAX)
        if not (turn.endings or turn.entries or turn.limit):
            return
        done = await self._turn_in_store(pool, turn)
        self._wake_all(pool, gathered.answer(done))
        if len(done.taken.granted) == TAKE_MAX:
            self._wake_all(pool, versions)
        for ticket in done.taken.granted:
            self._instruments.granted(pool, ticket)
            self.on_granted(pool, ticket)
        self.deliver(pool, (*done.taken.granted, *done.taken.refused))

    async def _turn_in_store(self, pool: PoolName, turn: Turn) -> TurnDone:
        """Try twice: the store may have hiccuped, or this process may have slept and come with an old time."""
        try:
            return await self._store.turn(pool, turn, self._clock.now_ms())
        except Unavailable as error:
            log.info("turn_repeated", pool=pool, error=error.message)
            await self._clock.sleep_ms(RETRY_MS)
            return await self._store.turn(pool, turn, self._clock.now_ms())

    def _wake_all(self, pool: PoolName, versions: Collection[VersionKey] | None) -> None:
        for version in (ALL,) if versions is None else versions:
            self.wake(pool, version)

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
        if ticket.standing is Standing.GRANTED and ticket.lease_expires_ms <= self._clock.now_ms():
            return  # this process slept: the lease has been settled by another, and the request must not run now
        gateway_id = GatewayId(deliveries.request_of(ticket).gateway_id)
        message = deliveries.delivery(ticket)
        answer = await self._gateways.deliver(gateway_id, message)
        if ticket.standing is Standing.GRANTED and not answer.wanted:
            ending = Ending(ticket.attempt, Outcome.CANCELLED)  # its client left: the slot is free at once
            await self.finish(pool, [(ending, ticket.version)])
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

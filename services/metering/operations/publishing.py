"""From the ledger to the billing stream: every row at least once, in ledger order, after its commit.

The ledger remembers how far it got, so a crash repeats records but never skips one. One process publishes at a time, by
a lease in the ledger; the others stand by. Whenever the bus was away the stream is looked at before anything new goes
into it: the last record of a stream that came back empty must not be a new one, which would say that all is there.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from services.metering.ports import BillingStream, Claimed, Ledger

log = structlog.get_logger(__name__)

WINDOW_ROWS: Final = 256  # in flight at once: enough to hide the round trip
LEASE_MS: Final = 15_000  # several times the longest wait for one window
LOOK_EVERY_MS: Final = 10_000  # how soon a lost stream is noticed
IDLE_MS: Final = 1_000  # how soon rows that another process appended are seen


class Publisher:
    """Publishes what the ledger holds and the billing stream does not."""

    def __init__(self, ledger: Ledger, billing: BillingStream, clock: Clock, *, holder: str) -> None:
        self._ledger = ledger
        self._billing = billing
        self._clock = clock
        self._holder = holder
        self._doubtful = True  # the stream may have lost records since it was last looked at

    async def run(self, stopping: asyncio.Event, appended: asyncio.Event) -> None:
        """Work until `stopping` is set. Cancelled at any point: the next run goes on, perhaps repeating a window."""
        while not stopping.is_set():
            appended.clear()
            if not await self._turn_or_report():
                await _wait(appended, IDLE_MS)

    async def turn(self) -> int:
        """Publish one window; how many rows were published. Raises Unavailable."""
        claimed = await self._claim()
        if claimed.rows and self._doubtful:
            self._doubtful = False
            if await self._sure(self.catch_up()):
                claimed = await self._claim()
        if not claimed.rows:
            return 0
        last = await self._sure(self._billing.publish(claimed.rows, turn=claimed.turn))
        await self._ledger.mark_published(self._holder, sequence=last, turn=claimed.turn)
        return last - claimed.rows[0].sequence + 1

    async def doubt(self) -> None:
        """Look at the stream before the next window: the bus was away, and may have come back without records."""
        self._doubtful = True

    async def _claim(self) -> Claimed:
        return await self._ledger.claim_unpublished(
            self._holder, now_ms=self._clock.now_ms(), lease_ms=LEASE_MS, limit=WINDOW_ROWS
        )

    async def _sure(self, asked: Coroutine[Any, Any, int]) -> int:
        """What the stream answers; one that does not is to be looked at again."""
        try:
            return await asked
        except BaseException:
            self._doubtful = True
            raise

    async def look(self) -> None:
        """See `catch_up`; a turn for `Lifecycle.every`."""
        await self.catch_up()

    async def catch_up(self) -> int:
        """Whether the stream has lost records, as one that was made anew has; then publish them again. How many.

        The ledger is asked first: a record that is published meanwhile only moves the stream further. Raises
        Unavailable."""
        before = await self._ledger.publication()
        last = await self._billing.last_sequence()
        if last is None or last >= before.sequence:
            return 0
        again = await self._ledger.publish_again(after=last, unless_erased=True)
        if again:
            log.warning("billing_stream_was_behind", stream_sequence=last, published_again=again)
        return again

    async def _turn_or_report(self) -> int:
        try:
            published = await self.turn()
        except Unavailable as error:
            log.warning("billing_not_published", reason=error.message)
            return 0
        return published


async def _wait(event: asyncio.Event, timeout_ms: int) -> None:
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await event.wait()
    except TimeoutError:
        return

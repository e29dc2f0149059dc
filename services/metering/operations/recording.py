"""From the usage stream into the ledger: pull, rate, append, and only then acknowledge.

A batch is what arrived while the last one committed (the stream asks ahead), so commits grow with the load by
themselves. While the ledger is away a batch is kept and tried again; its events stay unacknowledged in the stream
(invariant 14). Rating the next batch during a commit was measured and is slower: both want Python's lock. It publishes
nothing: `publishing` does.
"""

import asyncio
from collections.abc import Sequence
from decimal import DecimalException
from typing import Final

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, Unavailable
from services.metering.domain.ledger import Candidate, RawEvent, Rejected, Result
from services.metering.domain.prices import PriceBook
from services.metering.domain.rating import rate
from services.metering.domain.usage import UsageFacts, fault_of
from services.metering.money_ports import Pricing
from services.metering.ports import Delivery, Ledger, Observer, UsageStream

log = structlog.get_logger(__name__)

BATCH_EVENTS: Final = 1024  # at full load a commit's wait for the disk is then a few percent of the work
RETRY_MS_FIRST: Final = 100
RETRY_MS_MAX: Final = 5_000  # of a ledger that is away
RECONNECT_MS_MAX: Final = 1_000  # of a bus that is away


class Recorder:
    """Moves events from the stream to the ledger until told to stop."""

    def __init__(self, stream: UsageStream, ledger: Ledger, prices: Pricing, clock: Clock, observer: Observer) -> None:
        self._stream = stream
        self._ledger = ledger
        self._prices = prices
        self._clock = clock
        self._observer = observer
        self.appended = asyncio.Event()
        """Set whenever rows were appended, for whoever publishes them."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; the batch at hand is finished. Cancelled: what was committed comes again."""
        self._observer.condition("recording", reason=None)
        wait_ms = RETRY_MS_FIRST
        while not stopping.is_set():
            try:
                batch = await self._stream.pull(limit=BATCH_EVENTS)
            except Unavailable as error:
                self._observer.condition("usage_stream", reason=error.message)
                await self._clock.sleep_ms(wait_ms)
                wait_ms = min(wait_ms * 2, RECONNECT_MS_MAX)
                continue
            wait_ms = RETRY_MS_FIRST
            self._observer.condition("usage_stream", reason=None)
            if batch:
                await self._record(batch, stopping)

    async def _record(self, batch: Sequence[Delivery], stopping: asyncio.Event) -> None:
        """Record one batch, however long the ledger is away; told to stop meanwhile, leave it to the stream."""
        wait_ms = RETRY_MS_FIRST
        while True:
            try:
                await self._record_once(batch)
            except Unavailable as error:
                self._observer.condition("recording", reason=error.message)
                log.warning("usage_not_recorded", reason=error.message, events=len(batch))
            else:
                self._observer.condition("recording", reason=None)
                return
            if stopping.is_set():
                return
            await self._clock.sleep_ms(wait_ms)
            wait_ms = min(wait_ms * 2, RETRY_MS_MAX)

    async def _record_once(self, batch: Sequence[Delivery]) -> None:
        book = await self._prices.book()
        started_ms = self._clock.monotonic_ms()
        items = [rated_item(delivery.payload, delivery.raw, book) for delivery in batch]
        results = await append_dividing(self._ledger, items, now_ms=self._clock.now_ms())
        self._observer.recorded(results, commit_ms=self._clock.monotonic_ms() - started_ms)
        self.appended.set()
        _log_quarantined(results)
        try:
            await self._stream.acknowledge(batch)
        except Unavailable as error:
            log.info("usage_not_acknowledged", reason=error.message)  # it comes again, as duplicates


def rated_item(payload: UsageFacts | str, raw: RawEvent, book: PriceBook) -> Candidate | Rejected:
    """What to append for one message: a rated candidate, or the reason why it can be none."""
    if isinstance(payload, str):
        return Rejected(raw, payload)
    fault = fault_of(payload)
    if fault is not None:
        return Rejected(raw, fault)
    rule = book.rule_for(payload)
    price = None if rule is None else rule.price
    try:
        return Candidate(payload, rate(payload, price), raw)
    except DecimalException:
        return Rejected(raw, f"a price of {price.id if price else ''!r} is no decimal number")


async def append_dividing(ledger: Ledger, items: Sequence[Candidate | Rejected], *, now_ms: int) -> Sequence[Result]:
    """Append; if the database refuses a value, halve until the item is found, and put it aside. Raises Unavailable."""
    try:
        return await ledger.append(items, now_ms=now_ms)
    except InvalidInput as error:
        if len(items) == 1:
            return await ledger.append([Rejected(items[0].raw, error.message)], now_ms=now_ms)
    middle = len(items) // 2
    first = await append_dividing(ledger, items[:middle], now_ms=now_ms)
    return [*first, *await append_dividing(ledger, items[middle:], now_ms=now_ms)]


def _log_quarantined(results: Sequence[Result]) -> None:
    count = sum(result is Result.QUARANTINED for result in results)
    if count:
        log.warning("usage_quarantined", events=count)

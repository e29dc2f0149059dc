"""Looks at the parts that metering needs and says how they are: conditions often, gauges now and then."""

from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus
from services.metering.ports import Ledger, Observer, PriceSource, UsageStream


class Watch:
    """Turns for `Lifecycle.every`. None of them changes anything."""

    def __init__(
        self, bus: EventBus, stream: UsageStream, ledger: Ledger, prices: PriceSource, observer: Observer
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._ledger = ledger
        self._prices = prices
        self._observer = observer

    async def conditions(self) -> None:
        """Whether bus and catalogue are there; waits for nothing."""
        self._observer.condition("nats", reason=None if self._bus.connected else "the bus is away")
        self._observer.condition("catalogue", reason=self._prices.not_ready_reason)

    async def gauges(self) -> None:
        """Backlogs of both streams, and whether the ledger answers."""
        try:
            self._observer.unpublished(await self._ledger.unpublished())
        except Unavailable as error:
            self._observer.condition("ledger", reason=error.message)
        else:
            self._observer.condition("ledger", reason=None)
        try:
            self._observer.pending(await self._stream.pending())
        except Unavailable:
            return  # the gauge keeps its last value; the conditions say that the bus is away

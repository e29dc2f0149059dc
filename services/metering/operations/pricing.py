"""Keeps the price book: what operators applied and what the catalogue declares, in the ledger's database.

The catalogue says only what holds now; the book remembers since when, so that an event is rated by what held at its own
time, however late it comes and whichever process records it.
"""

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from services.metering.domain.prices import PriceBook, declared_rules
from services.metering.money_ports import PriceStore
from services.metering.ports import PriceSource

log = structlog.get_logger(__name__)

REFRESH_MS = 1_000  # how soon a price that another process wrote is used


class PriceKeeper:
    """`ports.Pricing` over a catalogue and a store."""

    def __init__(self, catalogue: PriceSource, store: PriceStore, clock: Clock) -> None:
        self._catalogue = catalogue
        self._store = store
        self._clock = clock
        self._book = PriceBook()
        self._generation = 0
        self._read_ms: int | None = None

    async def book(self) -> PriceBook:
        """See `Pricing.book`. Reads the store again when a second has passed or the catalogue is another."""
        catalogue = self._catalogue.current
        if not catalogue.generation:
            # Rating without any catalogue would book every amount as 0. Nobody can have called a model yet.
            raise Unavailable("events wait for the first catalogue")
        now_ms = self._clock.monotonic_ms()
        if catalogue.generation == self._generation and self._read_ms is not None:
            if now_ms - self._read_ms < REFRESH_MS:
                return self._book
            self._book = PriceBook(await self._store.rules())
            self._read_ms = now_ms
            return self._book
        await self.take_over()
        self._read_ms = now_ms
        return self._book

    async def take_over(self) -> None:
        """Write what the catalogue declares and the book does not have. Idempotent. Raises Unavailable."""
        catalogue = self._catalogue.current
        book = PriceBook(await self._store.rules())
        news = declared_rules(catalogue, self._clock.now_ms(), book)
        if news:
            await self._store.add(news, now_ms=self._clock.now_ms())
            log.info("prices_taken_over", rules=len(news), generation=catalogue.generation)
            book = PriceBook(await self._store.rules())
        self._book, self._generation = book, catalogue.generation

"""Gives quarantined events another chance, after a price, a bug or an emitter was corrected. Idempotent."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from roundhouse.clock import Clock
from services.metering.domain.ledger import Result
from services.metering.domain.prices import PriceBook
from services.metering.domain.usage import UsageFacts
from services.metering.operations.recording import append_dividing, rated_item
from services.metering.ports import Ledger, Quarantined

PAGE: Final = 100  # events of about 1 KB that are in memory at once

Decode = Callable[[str, bytes], UsageFacts | str]


async def replay_quarantine(
    ledger: Ledger, decode: Decode, book: PriceBook, clock: Clock, *, page: int = PAGE
) -> Counter[Result]:
    """Record all that can be recorded now; the rest stays quarantined. Counts by result. Raises Unavailable.

    A cancelled or failed call has done a part; the next one does the rest."""
    counts: Counter[Result] = Counter()
    last: Quarantined | None = None
    while entries := await ledger.quarantined(after=last, limit=page):
        for entry in entries:
            item = rated_item(decode(entry.raw.subject, entry.raw.data), entry.raw, book)
            (result,) = await append_dividing(ledger, [item], now_ms=clock.now_ms())
            counts[result] += 1
            if result is not Result.QUARANTINED:
                await ledger.mark_replayed(entry.fingerprint, now_ms=clock.now_ms())
        last = entries[-1]
    return counts

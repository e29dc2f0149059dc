"""Gives quarantined events another chance, after a price, a bug or an emitter was corrected. Idempotent."""

from collections import Counter
from collections.abc import Callable

from roundhouse.clock import Clock
from services.metering.domain.ledger import Result
from services.metering.domain.prices import PriceBook
from services.metering.domain.usage import UsageFacts
from services.metering.operations.recording import append_dividing, rated_item
from services.metering.ports import Ledger

Decode = Callable[[str, bytes], UsageFacts | str]


async def replay_quarantine(
    ledger: Ledger, decode: Decode, book: PriceBook, clock: Clock, *, limit: int
) -> Counter[Result]:
    """Record what can be recorded now; the rest stays quarantined. Counts by result. Raises Unavailable."""
    counts: Counter[Result] = Counter()
    for entry in await ledger.quarantined(limit=limit):
        item = rated_item(decode(entry.raw.subject, entry.raw.data), entry.raw, book)
        (result,) = await append_dividing(ledger, [item], now_ms=clock.now_ms())
        counts[result] += 1
        if result is not Result.QUARANTINED:
            await ledger.mark_replayed(entry.fingerprint, now_ms=clock.now_ms())
    return counts

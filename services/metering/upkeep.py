"""What an operator does to the ledger by hand, beside the running service: see and replay the quarantine.

Both commands use the ledger's own locks, so the service may run meanwhile. Outputs name no contents (invariant 16).
"""

from roundhouse.catalogue.records import Catalogue
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.clock import SystemClock
from roundhouse.errors import Unavailable
from roundhouse.redis_edge import open_redis
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_prices import SqlPrices
from services.metering.adapters.usage_wire import decode_event
from services.metering.domain.periods import instant_text
from services.metering.operations.pricing import PriceKeeper
from services.metering.operations.replaying import replay_quarantine
from services.metering.settings import MeteringSettings


class Snapshot:
    """A `PriceSource` that does not change."""

    not_ready_reason: str | None = None

    def __init__(self, catalogue: Catalogue) -> None:
        self.current = catalogue


async def list_quarantine(settings: MeteringSettings, limit: int) -> str:
    """One line an event: when, fingerprint, subject, bytes and reason. Raises Unavailable."""
    ledger = await SqlLedger.open(settings.ledger_url)
    try:
        entries = await ledger.quarantined(limit=limit)
    finally:
        await ledger.close()
    return "".join(
        f"{instant_text(entry.first_seen_ms)}  {entry.fingerprint[:12]}  {entry.raw.subject}  "
        f"{len(entry.raw.data)} bytes  {entry.reason}\n"
        for entry in entries
    )


async def replay(settings: MeteringSettings, limit: int) -> str:
    """Record what can be recorded now; one line with the counts. Raises Unavailable, also without a catalogue."""
    redis = open_redis(settings.redis_url)
    try:
        stored = await CatalogueStore(redis).get()
    finally:
        await redis.aclose()
    if stored is None:
        raise Unavailable("there is no catalogue, so nothing can be rated")
    ledger = await SqlLedger.open(settings.ledger_url)
    try:
        book = await PriceKeeper(Snapshot(stored.catalogue), SqlPrices(ledger.database), SystemClock()).book()
        counts = await replay_quarantine(ledger, decode_event, book, SystemClock(), limit=limit)
    finally:
        await ledger.close()
    return ", ".join(f"{count} {result.value}" for result, count in sorted(counts.items())) + "\n" if counts else ""

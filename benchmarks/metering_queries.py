"""How long queries take as the ledger grows: an operator's table and a tenant's pages, folded as in the service."""

import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.metering_events import CataloguePrices, facts_of
from roundhouse.clock import SystemClock
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_prices import SqlPrices
from services.metering.domain.ledger import RawEvent
from services.metering.domain.queries import Dimension, UsageFilter
from services.metering.operations.pricing import PriceKeeper
from services.metering.operations.recording import rated_item

BATCH_ROWS = 4_096
TURNS = 15
FIRST_MS = 1_767_225_600_000

Query = Callable[[SqlLedger], Awaitable[object]]

QUERIES: dict[str, Query] = {
    "all_by_tenant": lambda ledger: ledger.groups(UsageFilter(), (Dimension.TENANT,), after=None, limit=100),
    "one_tenant_by_hour": lambda ledger: ledger.groups(
        UsageFilter(tenant_id="tenant-7"), (Dimension.HOUR,), after=None, limit=1_000
    ),
    "one_tenant_from_a_minute_by_model": lambda ledger: ledger.groups(
        UsageFilter(tenant_id="tenant-7", from_ms=FIRST_MS + 61_000), (Dimension.MODEL,), after=None, limit=100
    ),
    "one_tenant_100_requests": lambda ledger: ledger.rows(UsageFilter(tenant_id="tenant-7"), after=None, limit=100),
}


async def query_latencies(folder: Path, rows: int) -> dict[str, float]:
    """Median milliseconds of each query at a hundredth, a tenth and all of `rows`."""
    ledger = await SqlLedger.open(f"sqlite:///{folder}/queries.sqlite3")
    chance, number = random.Random(9), 0
    book = await PriceKeeper(CataloguePrices(), SqlPrices(ledger.database), SystemClock()).book()
    figures: dict[str, float] = {}
    for size in (rows // 100, rows // 10, rows):
        while number < size:
            count = min(BATCH_ROWS, size - number)
            events = [facts_of(place, chance) for place in range(number, number + count)]
            await ledger.append([rated_item(event, RawEvent("s", b""), book) for event in events], now_ms=1)
            number += count
            while await ledger.fold(least=BATCH_ROWS):
                pass
        for name, query in QUERIES.items():
            figures[f"query_{name}_at_{size}_rows_ms"] = round(await _median_ms(ledger, query), 2)
    await ledger.close()
    return figures


async def _median_ms(ledger: SqlLedger, query: Query) -> float:
    taken = []
    for _ in range(TURNS):
        started = time.perf_counter()
        await query(ledger)
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken)

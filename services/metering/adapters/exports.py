"""A period's entries as CSV or Parquet, page by page: an export of any size takes the memory of one page.

Each row of the file is one entry: a usage row as it is, or (kind `reversal`, negative) one that a correction takes
back. Adding up a column gives the statement. Money is decimal: text in CSV, decimal128(38, 18) in Parquet.
"""

import csv
import io
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from services.metering.adapters.cloud_events import rated_record_json
from services.metering.adapters.statement_formats import spreadsheet_safe
from services.metering.domain.ledger import Entry
from services.metering.domain.periods import instant_text, month_start_ms, month_text
from services.metering.domain.rating import money_text

_encode = msgspec.json.Encoder().encode
REVERSAL: Final = "reversal"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
COUNTS: Final = ("input_tokens", "cached_tokens", "output_tokens", "run_ms")
COLUMNS: Final = (
    *("sequence", "kind", "corrects_sequence", "period", "usage_month", "time"),
    *("tenant", "model", "adapter", "class", "key", "node", "operation"),
    *("request_id", "outcome", "event_id", "source", "attempt"),
    *COUNTS,
    *("price_id", "currency", "amount"),
)
"""Of every kind of file, in this order."""

Pages = AsyncIterator[Sequence[Entry]]


def entry_values(entry: Entry, period_ms: int) -> dict[str, Any]:
    """One row of the file, as Python values. `sequence` is of the row that booked the entry."""
    row, sign = entry.row, entry.sign
    facts = row.facts
    return {
        "sequence": row.sequence if entry.by_sequence is None else entry.by_sequence,
        "kind": row.kind if sign > 0 else REVERSAL,
        "corrects_sequence": row.corrects_sequence if sign > 0 else row.sequence,
        "period": month_text(period_ms),
        "usage_month": month_text(month_start_ms(facts.time_ms)),
        "time": _EPOCH + timedelta(milliseconds=facts.time_ms),
        "tenant": facts.tenant_id,
        "model": facts.model,
        "adapter": facts.adapter,
        "class": facts.priority_class.value,
        "key": facts.key_id,
        "node": facts.node_id,
        "operation": facts.operation,
        "request_id": facts.request_id,
        "outcome": facts.outcome.value,
        "event_id": facts.event_id,
        "source": facts.source,
        "attempt": facts.attempt,
        **{name: sign * getattr(facts, name) for name in COUNTS},
        "price_id": row.rating.price_id,
        "currency": row.rating.currency,
        "amount": row.rating.amount if sign > 0 else row.rating.amount.copy_negate(),
    }


async def as_csv(pages: Pages, period_ms: int) -> AsyncIterator[bytes]:
    """CSV in UTF-8 with a header; a part a page."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    async for page in pages:
        for entry in page:
            values = entry_values(entry, period_ms)
            values["time"] = instant_text(entry.row.facts.time_ms)
            values["amount"] = money_text(values["amount"])
            writer.writerow(spreadsheet_safe(values))
        yield _taken(out)
    yield _taken(out)


def _taken(out: io.StringIO) -> bytes:
    text = out.getvalue()
    out.seek(0)
    out.truncate()
    return text.encode()


async def as_cloud_events(pages: Pages, period_ms: int) -> AsyncIterator[bytes]:
    """One CloudEvent (rated record) a line; what a correction takes back is in its own event."""
    async for page in pages:
        yield b"".join(
            _encode(rated_record_json(entry.row)) + b"\n"
            for entry in page
            if entry.row.period_ms == period_ms and entry.sign > 0
        )


async def as_parquet(pages: Pages, period_ms: int) -> AsyncIterator[bytes]:
    """See `parquet_export.as_parquet`."""
    # Imported here: Arrow is a quarter of the memory of a process that may never write such a file.
    from services.metering.adapters.parquet_export import as_parquet

    async for part in as_parquet(pages, period_ms):
        yield part


Format = Callable[[Pages, int], AsyncIterator[bytes]]
FORMATS: Final[dict[str, tuple[Format, str]]] = {
    "csv": (as_csv, "text/csv; charset=utf-8"),
    "jsonl": (as_cloud_events, "application/jsonl"),
    "parquet": (as_parquet, "application/vnd.apache.parquet"),
}

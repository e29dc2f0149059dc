"""A period's entries as Parquet: the rows of `exports`, a row group a page. Imported when such a file is asked for."""

from collections.abc import AsyncIterator, Sequence
from typing import Final

import pyarrow as pa
from pyarrow import parquet

from services.metering.adapters.exports import COLUMNS, COUNTS, Pages, entry_values
from services.metering.domain.ledger import Entry

MONEY: Final = pa.decimal128(38, 18)  # 12 decimals of a price a million tokens are 18 decimals of an amount
SCHEMA: Final = pa.schema(
    [
        ("sequence", pa.int64()),
        ("kind", pa.string()),
        ("corrects_sequence", pa.int64()),
        ("period", pa.string()),
        ("usage_month", pa.string()),
        ("time", pa.timestamp("ms", tz="UTC")),
        *((name, pa.string()) for name in ("tenant", "model", "adapter", "class", "key", "node", "operation")),
        *((name, pa.string()) for name in ("request_id", "outcome", "event_id", "source")),
        ("attempt", pa.int64()),
        *((name, pa.int64()) for name in COUNTS),
        ("price_id", pa.string()),
        ("currency", pa.string()),
        ("amount", MONEY),
    ]
)
assert tuple(SCHEMA.names) == COLUMNS


class _Pipe:
    """A file that gives what was written to whoever asks, once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


async def as_parquet(pages: Pages, period_ms: int) -> AsyncIterator[bytes]:
    """Parquet with a row group a page, compressed with zstd."""
    pipe = _Pipe()
    writer = parquet.ParquetWriter(pa.PythonFile(pipe, mode="w"), SCHEMA, compression="zstd")
    async for page in pages:
        if page:
            writer.write_table(_table(page, period_ms))
        yield pipe.taken()
    writer.close()
    yield pipe.taken()


def _table(page: Sequence[Entry], period_ms: int) -> pa.Table:
    rows = [entry_values(entry, period_ms) for entry in page]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)

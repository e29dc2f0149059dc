"""Writes the golden usage events. Run it only to add a version: what is committed is what old emitters sent.

python -m tests.golden.make_usage_events
"""

import json
from pathlib import Path

from services.metering.adapters.cloud_events import rated_record_json, usage_event_json
from services.metering.adapters.usage_wire import encode_event, rated_record
from services.metering.domain.ledger import LedgerRow, RowKind
from services.metering.domain.periods import month_start_ms, next_month_ms
from services.metering.domain.rating import rate
from tests.builders.usage import PRICE, TIME_MS, abandoned, usage_facts

FOLDER = Path(__file__).parent / "usage_v1"


def correction() -> LedgerRow:
    """A gateway's event after a scheduler's, whose month was closed meanwhile."""
    later = next_month_ms(month_start_ms(TIME_MS))
    return LedgerRow(
        sequence=2,
        revision=1,
        facts=usage_facts(),
        rating=rate(usage_facts(), PRICE),
        recorded_ms=TIME_MS + 1,
        corrects_sequence=1,
        period_ms=later,
        kind=RowKind.SUPERSEDES.value,
        reversal_ms=later,
        credit=rate(abandoned(), PRICE),
    )


def main() -> None:
    """Write what is not there yet; an existing golden file is never changed."""
    FOLDER.mkdir(exist_ok=True)
    row = correction()
    for name, data in (
        ("usage_event.bin", encode_event(row.facts).SerializeToString(deterministic=True)),
        ("rated_record.bin", rated_record(row).SerializeToString(deterministic=True)),
        ("usage_event.json", _json(usage_event_json(row.facts))),
        ("rated_record.json", _json(rated_record_json(row))),
    ):
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(data)


def _json(event: object) -> bytes:
    return (json.dumps(event, indent=2) + "\n").encode()


if __name__ == "__main__":
    main()

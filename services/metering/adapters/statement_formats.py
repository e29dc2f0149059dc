"""Statements and closed periods as JSON, text and CSV. The shapes are a contract: docs/tenants/billing.md."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any, Final

from services.metering.domain.periods import instant_text, month_text
from services.metering.domain.rating import money_text
from services.metering.domain.statements import ClosedPeriod, Line, Statement, Sums

LINE_COLUMNS: Final = (
    *("usage_month", "model", "adapter", "class", "price_id"),
    *("requests", "attempts", "input_tokens", "cached_tokens", "output_tokens", "amount", "currency"),
)
_TEXT_COLUMNS: Final = (
    "month",
    "model",
    "adapter",
    "class",
    "price",
    "requests",
    "input",
    "cached",
    "output",
    "amount",
)


def statement_json(statement: Statement) -> dict[str, Any]:
    """The whole statement."""
    return {
        "tenant": statement.tenant_id,
        "period": month_text(statement.period_ms),
        "status": "open" if statement.closed_ms is None else "closed",
        "closed": None if statement.closed_ms is None else instant_text(statement.closed_ms),
        "sequence": statement.sequence,
        "signed_as": statement.pseudonym or None,
        "lines": [line_json(line) for line in statement.lines],
        "totals": [sums.as_json() for sums in statement.totals],
    }


def line_json(line: Line) -> dict[str, Any]:
    """One line; `usage_month` is when it was used, which for a correction is not when it is billed."""
    return {
        "usage_month": month_text(line.usage_month_ms),
        "model": line.model,
        "adapter": line.adapter,
        "class": line.priority_class,
        "price_id": line.price_id,
        **line.sums.as_json(),
    }


def statement_csv(statement: Statement) -> str:
    """One row a line. Amounts are exact decimals."""
    out = io.StringIO()
    writer = csv.DictWriter(out, LINE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(spreadsheet_safe(line_json(line)) for line in statement.lines)
    return out.getvalue()


def spreadsheet_safe(values: dict[str, Any]) -> dict[str, Any]:
    """Texts that a spreadsheet would run as a formula get a quote before them."""
    return {name: f"'{value}" if _is_formula(name, value) else value for name, value in values.items()}


def _is_formula(name: str, value: Any) -> bool:
    return isinstance(value, str) and name != "amount" and value[:1] in ("=", "+", "-", "@", "\t", "\r")


def statement_text(statement: Statement) -> str:
    """For people: lines, then totals, then what it means that it is open or closed."""
    rows = [_text_row(statement, line) for line in statement.lines]
    totals = [_text_total(sums) for sums in statement.totals]
    title = f"Statement of {statement.tenant_id} for {month_text(statement.period_ms)}"
    if statement.closed_ms is None:
        state = "This month is open: it may still grow."
    else:
        state = f"Closed {instant_text(statement.closed_ms)}; in the signed totals as {statement.pseudonym}."
    return "\n".join([title, "", *_table([_TEXT_COLUMNS, *rows, *totals]), "", state, ""])


def _text_total(sums: Sums) -> tuple[str, ...]:
    counts = (sums.requests, sums.input_tokens, sums.cached_tokens, sums.output_tokens)
    return ("total", "", "", "", "", *map(str, counts), _money(sums))


def _money(sums: Sums) -> str:
    return f"{money_text(sums.amount)} {sums.currency or 'unpriced'}"


def _text_row(statement: Statement, line: Line) -> tuple[str, ...]:
    late = line.usage_month_ms != statement.period_ms
    sums = line.sums
    counts = (sums.requests, sums.input_tokens, sums.cached_tokens, sums.output_tokens)
    return (
        month_text(line.usage_month_ms) + (" (correction)" if late else ""),
        *(line.model, line.adapter or "-", line.priority_class, line.price_id or "-"),
        *map(str, counts),
        _money(sums),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    texts = 5  # the columns before the first number
    return [
        "  ".join(
            cell.ljust(width) if place < texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def period_json(closed: ClosedPeriod) -> dict[str, Any]:
    """A closed period with what is needed to check it: the signature is over the bytes of `document`."""
    return {
        "period": month_text(closed.period_ms),
        "closed": instant_text(closed.closed_ms),
        "sequence": closed.sequence,
        "totals": json.loads(closed.document)["totals"],
        "document": closed.document,
        "signature": closed.signature,
        "public_key": closed.public_key,
        "algorithm": "Ed25519",
    }

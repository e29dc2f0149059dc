"""What can be asked of the ledger, and what it answers. Parsing of parameters is here; reading is the ledger's.

Only rows that nothing supersedes count. A period is half-open: `from_ms <= time < to_ms`, by the event's own time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Final

from services.metering.domain.ledger import LedgerRow
from services.metering.domain.periods import parse_instant

LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 1000  # a guess: a page of 1,000 requests is about 600 kB of JSON


class Dimension(StrEnum):
    """What rows can be grouped by."""

    TENANT = "tenant"
    MODEL = "model"
    ADAPTER = "adapter"
    CLASS = "class"
    KEY = "key"
    DAY = "day"
    HOUR = "hour"


PER_REQUEST: Final = "request"
"""The value of `group_by` that asks for single requests instead of sums."""


@dataclass(frozen=True, slots=True)
class EachRequest:
    """Single requests are asked for, not sums."""


DEFAULT_GROUP_BY: Final = (Dimension.TENANT, Dimension.MODEL)

GroupValue = str | int  # names, or the start of a period in milliseconds
GroupKey = tuple[GroupValue, ...]  # one value a dimension, then the currency


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which rows; None = all."""

    tenant_id: str | None = None
    model: str | None = None
    key_id: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over rows of one currency. `attempts` counts events; a request counts where its first attempt does."""

    attempts: int
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    amount: Decimal
    currency: str


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """Sums of one group."""

    key: GroupKey
    totals: Totals


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Groups in the order of their keys; `next_after` continues, None at the end."""

    groups: tuple[UsageGroup, ...]
    next_after: GroupKey | None


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows in ledger order; `next_after` continues, None at the end."""

    rows: tuple[LedgerRow, ...]
    next_after: int | None


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Totals for comparing the ledger with what was admitted, settled and published."""

    totals: tuple[Totals, ...]  # one a currency
    outcomes: tuple[tuple[str, int], ...]  # attempts by outcome
    corrections: int
    quarantined: int  # of the whole ledger: what cannot be read has no tenant
    sequence: int  # last of the ledger
    published_sequence: int  # last that the billing stream has


@dataclass(frozen=True, slots=True)
class BadQuery:
    """A parameter that cannot be used, and why."""

    param: str
    message: str


def parse_filter(parameters: Mapping[str, str]) -> UsageFilter | BadQuery:
    """The filter in `tenant`, `model`, `key`, `from` and `to`; an empty value means that it is not given."""
    bounds: dict[str, int | None] = {}
    for name in ("from", "to"):
        text = parameters.get(name) or None
        bounds[name] = parse_instant(text) if text is not None else None
        if text is not None and bounds[name] is None:
            return BadQuery(name, f"{name} must be a date, an RFC 3339 time with an offset, or Unix milliseconds")
    from_ms, to_ms = bounds["from"], bounds["to"]
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        return BadQuery("to", "to must be later than from")
    return UsageFilter(
        tenant_id=parameters.get("tenant") or None,
        model=parameters.get("model") or None,
        key_id=parameters.get("key") or None,
        from_ms=from_ms,
        to_ms=to_ms,
    )


def parse_group_by(text: str) -> tuple[Dimension, ...] | EachRequest | BadQuery:
    """Dimensions in the order given; `EachRequest` for `request`; the default if the text is empty."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return DEFAULT_GROUP_BY
    if PER_REQUEST in names:
        return EachRequest() if len(names) == 1 else BadQuery("group_by", "request cannot be combined with others")
    known = {dimension.value for dimension in Dimension}
    unknown = [name for name in names if name not in known]
    if unknown:
        return BadQuery("group_by", f"group_by knows {', '.join([*known_names(), PER_REQUEST])}; not {unknown[0]!r}")
    if len(set(names)) < len(names):
        return BadQuery("group_by", "group_by names a dimension twice")
    if Dimension.DAY in names and Dimension.HOUR in names:
        return BadQuery("group_by", "group_by takes day or hour, not both")
    return tuple(Dimension(name) for name in names)


def known_names() -> list[str]:
    """The dimensions by name, in the order of their definition."""
    return [dimension.value for dimension in Dimension]


def parse_limit(text: str) -> int | BadQuery:
    """Rows a page: 1 to `LIMIT_MAX`, `LIMIT_DEFAULT` if the text is empty."""
    if not text:
        return LIMIT_DEFAULT
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= LIMIT_MAX:
        return BadQuery("limit", f"limit must be a whole number from 1 to {LIMIT_MAX}")
    return int(text)

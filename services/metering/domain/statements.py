"""What a period comes to: lines of a statement, and the document that is signed when the period is closed. Pure.

The signed document names tenants by pseudonym: an erasure removes the name that belongs to it, and neither the document
nor its signature changes. Money is exact; nothing is rounded.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from services.metering.domain.periods import instant_text, month_text
from services.metering.domain.rating import EXACT, money_text

DOCUMENT_TYPE: Final = "roundhouse.closed-period.v1"


@dataclass(frozen=True, slots=True)
class Sums:
    """Net counts and money of one currency; corrections are taken in."""

    currency: str
    attempts: int
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    run_ms: int
    amount: Decimal

    def plus(self, other: "Sums") -> "Sums":
        """Both together. They must be of one currency."""
        assert self.currency == other.currency, "amounts of different currencies are never added"
        return Sums(
            self.currency,
            self.attempts + other.attempts,
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.run_ms + other.run_ms,
            EXACT.add(self.amount, other.amount),
        )

    def as_json(self) -> dict[str, Any]:
        """Counts as numbers, money as a decimal text."""
        return {
            "requests": self.requests,
            "attempts": self.attempts,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "amount": money_text(self.amount),
            "currency": self.currency,
        }


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a statement. `usage_month_ms` other than the period: a correction, or usage that came late."""

    usage_month_ms: int
    model: str
    adapter: str
    priority_class: str
    price_id: str
    sums: Sums


@dataclass(frozen=True, slots=True)
class Statement:
    """Everything that is booked for one tenant in one period, as of a ledger sequence."""

    tenant_id: str
    period_ms: int
    closed_ms: int | None  # None: still open, so it may grow
    sequence: int
    pseudonym: str  # the tenant's name in the signed document; empty while open
    lines: tuple[Line, ...]

    @property
    def totals(self) -> list[Sums]:
        """One a currency, in their order."""
        return total_of(line.sums for line in self.lines)


@dataclass(frozen=True, slots=True)
class ClosedPeriod:
    """A period that nothing is booked in any more, as it was signed. Signature and key are base64 (Ed25519, raw)."""

    period_ms: int
    sequence: int
    closed_ms: int
    document: str
    signature: str
    public_key: str


@dataclass(frozen=True, slots=True)
class Closing:
    """What is to be signed. `by_tenant` pairs a pseudonym with its sums, in that order and by currency."""

    cluster: str
    period_ms: int
    closed_ms: int
    sequence: int
    by_tenant: tuple[tuple[str, Sums], ...]


def total_of(sums: Iterable[Sums]) -> list[Sums]:
    """Added up by currency, in the order of the currencies."""
    totals: dict[str, Sums] = {}
    for item in sums:
        known = totals.get(item.currency)
        totals[item.currency] = item if known is None else known.plus(item)
    return [totals[currency] for currency in sorted(totals)]


def document_of(closing: Closing) -> str:
    """The text that is signed: JSON with sorted keys and no spaces, so that it is the same for the same content."""
    content = {
        "type": DOCUMENT_TYPE,
        "cluster": closing.cluster,
        "period": month_text(closing.period_ms),
        "closed": instant_text(closing.closed_ms),
        "sequence": closing.sequence,
        "totals": [sums.as_json() for sums in total_of(sums for _, sums in closing.by_tenant)],
        "tenants": [{"tenant": pseudonym, **sums.as_json()} for pseudonym, sums in closing.by_tenant],
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def differences(closed: ClosedPeriod, now: Sequence[tuple[str, Sums]]) -> list[str]:
    """Where the ledger's sums of today differ from what was signed; none if it was left alone."""
    signed = {(item["tenant"], item["currency"]): item for item in json.loads(closed.document)["tenants"]}
    found = {(pseudonym, sums.currency): {"tenant": pseudonym, **sums.as_json()} for pseudonym, sums in now}
    return [
        f"{tenant} {currency}: signed {signed.get((tenant, currency))}, ledger {found.get((tenant, currency))}"
        for tenant, currency in sorted(signed.keys() | found.keys())
        if signed.get((tenant, currency)) != found.get((tenant, currency))
    ]

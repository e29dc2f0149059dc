"""What a batch of events does to the ledger: a pure decision over what is already recorded.

Invariant 14: an event counts once, however often, late or out of order it arrives. The rules:

1. First event of a key: a new row.
2. The same event again: nothing.
3. A gateway's event after a scheduler's (the gateway was only cut off, not dead): a correction row that replaces it.
4. A scheduler's event after a gateway's: nothing, the gateway saw more.
5. The same key from the same emitter with other content: quarantine; the first stays.

The sum over rows that nothing supersedes is then the same for every order of arrival. Rows are never changed, except
that a superseded row learns its successor. Sequences rise by one, without gaps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from services.metering.domain.rating import Rating
from services.metering.domain.usage import Emitter, EventKey, UsageFacts


class RawEvent(Struct, frozen=True, gc=False):
    """An event as it came, for the quarantine."""

    subject: str
    data: bytes


class Candidate(Struct, frozen=True):
    """An acceptable event, rated, that may become a row."""

    facts: UsageFacts
    rating: Rating
    raw: RawEvent


class Rejected(Struct, frozen=True):
    """An event that can never become a row."""

    raw: RawEvent
    reason: str


class LedgerRow(Struct, frozen=True):
    """One row. `revision` 0 is the first of its key, 1 the correction that replaces it."""

    sequence: int
    revision: int
    facts: UsageFacts
    rating: Rating
    recorded_ms: int
    corrects_sequence: int | None = None


class Result(StrEnum):
    """What became of one event."""

    RECORDED = "recorded"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"  # it replaced the scheduler's row of the same key
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class BatchPlan:
    """What to write for one batch, in one transaction. Built up by `plan_batch`."""

    head: int  # the last sequence used
    rows: list[LedgerRow] = field(default_factory=list)
    successors: dict[int, int] = field(default_factory=dict)  # superseded sequence → sequence of its correction
    quarantined: list[Rejected] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)  # one an item, in order


def plan_batch(
    items: Sequence[Candidate | Rejected], recorded: Iterable[LedgerRow], *, head: int, now_ms: int
) -> BatchPlan:
    """Decide about a batch. `recorded` holds every row whose key occurs in it; `head` is the last sequence. O(n)."""
    plan = BatchPlan(head)
    known: dict[EventKey, dict[str, LedgerRow]] = {}
    for row in recorded:
        known.setdefault(row.facts.key, {})[row.facts.emitter] = row
    for item in items:
        if isinstance(item, Rejected):
            plan.quarantined.append(item)
            plan.results.append(Result.QUARANTINED)
        else:
            plan.results.append(_place(plan, item, known.setdefault(item.facts.key, {}), now_ms))
    assert plan.head == head + len(plan.rows), "sequences have no gaps"
    return plan


def _place(plan: BatchPlan, candidate: Candidate, same_key: dict[str, LedgerRow], now_ms: int) -> Result:
    emitter = candidate.facts.emitter
    before = same_key.get(emitter)
    if before is not None:
        if before.facts == candidate.facts:
            return Result.DUPLICATE
        plan.quarantined.append(
            Rejected(candidate.raw, f"another event of this id is recorded as row {before.sequence}")
        )
        return Result.QUARANTINED
    replaced = same_key.get(Emitter.SCHEDULER)
    if same_key and replaced is None:
        return Result.DUPLICATE
    same_key[emitter] = _append(plan, candidate, replaced, now_ms)
    return Result.RECORDED if replaced is None else Result.SUPERSEDED


def _append(plan: BatchPlan, candidate: Candidate, replaced: LedgerRow | None, now_ms: int) -> LedgerRow:
    plan.head += 1
    row = LedgerRow(
        sequence=plan.head,
        revision=0 if replaced is None else 1,
        facts=candidate.facts,
        rating=candidate.rating,
        recorded_ms=now_ms,
        corrects_sequence=None if replaced is None else replaced.sequence,
    )
    plan.rows.append(row)
    if replaced is not None:
        plan.successors[replaced.sequence] = row.sequence
    return row

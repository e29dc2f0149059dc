"""What a batch of events does to the ledger: a pure decision over what is already recorded.

Invariant 14: an event counts once, however often, late or out of order it arrives. The rules:

1. First event of a key: a new row.
2. The same event again: nothing.
3. A gateway's event after a scheduler's (the gateway was only cut off, not dead): a correction row that replaces it.
4. A scheduler's event after a gateway's: nothing, the gateway saw more.
5. The same key from the same emitter with other content: quarantine; the first stays.

The sum over rows that nothing supersedes is then the same for every order of arrival. Rows are never changed, except
that a superseded row learns its successor. Sequences rise by one, without gaps.

Each row is booked in an accounting period: the month of its own time while that is open, else the first open one. A
correction takes back what it corrects in the period where that is booked, or in the first open one if that is closed.
So a closed period never changes: every later row books elsewhere (docs/decisions/0074-periods.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from services.metering.domain.periods import month_start_ms
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


class RowKind(StrEnum):
    """Why there is a row."""

    USAGE = "usage"
    LATE = "late"  # its own period was closed when it came
    SUPERSEDES = "supersedes"  # a gateway's event in place of a scheduler's
    RERATES = "rerates"  # the same event at another price


class LedgerRow(Struct, frozen=True):
    """One row. `revision` 0 is the first of its key, each correction has the next.

    `period_ms` is the month it is booked in; `reversal_ms`, of corrections only, the month in which what it corrects is
    taken back."""

    sequence: int
    revision: int
    facts: UsageFacts
    rating: Rating
    recorded_ms: int
    corrects_sequence: int | None = None
    period_ms: int = 0
    kind: str = RowKind.USAGE.value
    reversal_ms: int | None = None
    credit: Rating | None = None  # of a correction: the rating that it takes back, where that was read too


class Entry(Struct, frozen=True):
    """One line of a period's books: a row as it is, or a row that a later one takes back (`by_sequence`)."""

    row: LedgerRow
    by_sequence: int | None = None

    @property
    def sign(self) -> int:
        """1, or −1 for what is taken back."""
        return 1 if self.by_sequence is None else -1


class Books(Struct, frozen=True):
    """Where the ledger stands: the last sequence used, and the start of the first month that is open (0 = all are)."""

    head: int
    open_from_ms: int = 0


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
    open_from_ms: int = 0


def plan_batch(
    items: Sequence[Candidate | Rejected], recorded: Iterable[LedgerRow], books: Books, *, now_ms: int
) -> BatchPlan:
    """Decide about a batch. `recorded` holds every row whose key occurs in it, by rising sequence. O(n)."""
    plan = BatchPlan(books.head, open_from_ms=books.open_from_ms)
    known: dict[EventKey, dict[str, LedgerRow]] = {}
    for row in recorded:
        known.setdefault(row.facts.key, {})[row.facts.emitter] = row
    for item in items:
        if isinstance(item, Rejected):
            plan.quarantined.append(item)
            plan.results.append(Result.QUARANTINED)
        else:
            plan.results.append(_place(plan, item, known.setdefault(item.facts.key, {}), now_ms))
    assert plan.head == books.head + len(plan.rows), "sequences have no gaps"
    return plan


def plan_rerating(rated_anew: Iterable[tuple[LedgerRow, Rating]], books: Books, *, now_ms: int) -> BatchPlan:
    """Corrections for rows (that nothing supersedes) whose price is another now; the others are left alone. O(n)."""
    plan = BatchPlan(books.head, open_from_ms=books.open_from_ms)
    for row, rating in rated_anew:
        if rating != row.rating:
            _append(plan, row.facts, rating, row, now_ms, RowKind.RERATES)
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
    kind = RowKind.USAGE if replaced is None else RowKind.SUPERSEDES
    same_key[emitter] = _append(plan, candidate.facts, candidate.rating, replaced, now_ms, kind)
    return Result.RECORDED if replaced is None else Result.SUPERSEDED


def _append(
    plan: BatchPlan, facts: UsageFacts, rating: Rating, replaced: LedgerRow | None, now_ms: int, kind: RowKind
) -> LedgerRow:
    plan.head += 1
    own_ms = month_start_ms(facts.time_ms)
    period_ms = max(own_ms, plan.open_from_ms)
    if kind is RowKind.USAGE and period_ms != own_ms:
        kind = RowKind.LATE
    if replaced is None:
        row = LedgerRow(plan.head, 0, facts, rating, now_ms, None, period_ms, kind._value_)
    else:
        row = LedgerRow(
            sequence=plan.head,
            revision=replaced.revision + 1,
            facts=facts,
            rating=rating,
            recorded_ms=now_ms,
            corrects_sequence=replaced.sequence,
            period_ms=period_ms,
            kind=kind._value_,
            reversal_ms=max(replaced.period_ms, plan.open_from_ms),
        )
        plan.successors[replaced.sequence] = row.sequence
    plan.rows.append(row)
    return row

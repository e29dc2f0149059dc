"""Five books of the same requests, compared: what was admitted and settled, what was emitted, recorded and billed.

Pure. Everything is joined by request; a request belongs to the window in which its last entry lies. What one book says
and another does not is a difference, told with the request's id (invariant 13). A gateway's event counts before a
scheduler's of the same attempt, as in the ledger. An erased tenant's requests are counted and not compared: its rows
bear a pseudonym, and what the other books held of them was removed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from services.metering.domain.usage import Emitter


class Kind(StrEnum):
    """What does not agree."""

    NO_SETTLEMENT = "no_settlement"  # emitted or recorded, but the quota never heard of the request
    WITHDRAWN_BUT_BILLED = "withdrawn_but_billed"  # the quota gave everything back, and yet it has tokens
    SETTLED_DIFFERS = "settled_differs"  # tokens in the quota and in the events
    NO_EVENT = "no_event"  # settled, and nothing was emitted
    NO_ROW = "no_row"  # emitted, and not in the ledger
    ROW_WITHOUT_EVENT = "row_without_event"  # in the ledger, and never emitted
    ROW_DIFFERS = "row_differs"  # tokens in the ledger and in the event
    NO_RECORD = "no_record"  # in the ledger, and not in the billing stream
    RECORD_WITHOUT_ROW = "record_without_row"
    RECORD_DIFFERS = "record_differs"  # tokens or amount in the billing stream and in the ledger
    ENGINE_DIFFERS = "engine_differs"  # tokens that an engine counted for a model, and the ledger


class Ending(StrEnum):
    """How an admission ended in the quota."""

    SETTLED = "settled"
    WITHDRAWN = "withdrawn"
    LAPSED = "lapsed"  # its gateway died: nobody settled it, and what it reserved drained by itself
    RUNNING = "running"


class RequestKey(NamedTuple):
    """One request of one tenant."""

    tenant_id: str
    request_id: str


class Settlement(Struct, frozen=True):
    """What the quota says of a request. `tokens`: input and output of all attempts."""

    key: RequestKey
    ending: Ending
    tokens: int
    time_ms: int


class Emitted(Struct, frozen=True):
    """One usage event in the stream."""

    key: RequestKey
    event_id: str
    emitter: str
    input_tokens: int
    output_tokens: int
    time_ms: int


class Recorded(Struct, frozen=True):
    """One ledger row that nothing supersedes."""

    key: RequestKey
    event_id: str
    sequence: int
    input_tokens: int
    output_tokens: int
    amount: str
    time_ms: int


class Billed(Struct, frozen=True):
    """One record of the billing stream."""

    key: RequestKey
    event_id: str
    sequence: int
    input_tokens: int
    output_tokens: int
    amount: str
    time_ms: int


class Evidence(Struct, frozen=True):
    """Everything that the books hold for a window and a while on either side of it."""

    settlements: Sequence[Settlement]
    emitted: Sequence[Emitted]
    recorded: Sequence[Recorded]
    billed: Sequence[Billed]
    published_sequence: int  # rows beyond it are not due in the billing stream yet
    erased: frozenset[str] = frozenset()  # tenants whose messages and settlements were removed on purpose


class Difference(Struct, frozen=True):
    """What does not agree about one request. The text names numbers and books, no contents."""

    kind: Kind
    request_id: str
    tenant_id: str
    detail: str


class Comparison(Struct, frozen=True):
    """The result for one window. `checked` counts requests, and entries by book."""

    from_ms: int
    to_ms: int
    checked: Mapping[str, int]
    differences: Sequence[Difference]


class _Request:
    """Everything that is known of one request."""

    def __init__(self) -> None:
        self.settlement: Settlement | None = None
        self.events: dict[str, Emitted] = {}  # by event id; the one that counts
        self.rows: dict[str, Recorded] = {}
        self.records: dict[str, dict[int, Billed]] = defaultdict(dict)  # event id → by sequence
        self.last_ms = 0

    def note(self, time_ms: int) -> None:
        self.last_ms = max(self.last_ms, time_ms)


def compare(evidence: Evidence, from_ms: int, to_ms: int) -> Comparison:
    """Every difference of the requests whose last entry is in `from_ms <= time < to_ms`. O(entries)."""
    requests = _join(evidence)
    inside = {key: each for key, each in requests.items() if from_ms <= each.last_ms < to_ms}
    differences = [
        Difference(kind, key.request_id, key.tenant_id, detail)
        for key, request in sorted(inside.items())
        if key.tenant_id not in evidence.erased
        for kind, detail in _differences(request, evidence.published_sequence)
    ]
    erased = sum(key.tenant_id in evidence.erased for key in inside)
    return Comparison(from_ms, to_ms, _checked(inside.values()) | ({"erased": erased} if erased else {}), differences)


def _join(evidence: Evidence) -> dict[RequestKey, _Request]:
    requests: dict[RequestKey, _Request] = defaultdict(_Request)
    for settlement in evidence.settlements:
        request = requests[settlement.key]
        known = request.settlement
        if known is None or known.ending in (Ending.LAPSED, Ending.RUNNING):  # a late settlement says more
            request.settlement = settlement
        request.note(settlement.time_ms)
    for event in evidence.emitted:
        request = requests[event.key]
        before = request.events.get(event.event_id)
        if before is None or (before.emitter != Emitter.GATEWAY and event.emitter == Emitter.GATEWAY):
            request.events[event.event_id] = event
        request.note(event.time_ms)
    for row in evidence.recorded:
        requests[row.key].rows[row.event_id] = row
        requests[row.key].note(row.time_ms)
    for record in evidence.billed:
        requests[record.key].records[record.event_id][record.sequence] = record
        requests[record.key].note(record.time_ms)
    return requests


def _checked(requests: Iterable[_Request]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for request in requests:
        counts["requests"] += 1
        if request.settlement is not None:
            counts[request.settlement.ending.value] += 1
        counts["events"] += len(request.events)
        counts["rows"] += len(request.rows)
        counts["records"] += sum(map(len, request.records.values()))
    return dict(counts)


def _differences(request: _Request, published: int) -> Iterator[tuple[Kind, str]]:
    yield from _of_quota(request)
    for event_id, event in sorted(request.events.items()):
        row = request.rows.get(event_id)
        if row is None:
            yield Kind.NO_ROW, f"{event_id} was emitted by the {event.emitter} with {_tokens(event)}; no ledger row"
        elif (row.input_tokens, row.output_tokens) != (event.input_tokens, event.output_tokens):
            yield Kind.ROW_DIFFERS, f"{event_id}: event {_tokens(event)}, row {row.sequence} {_tokens(row)}"
    for event_id, row in sorted(request.rows.items()):
        if event_id not in request.events:
            yield Kind.ROW_WITHOUT_EVENT, f"row {row.sequence} of {event_id} has no event in the stream"
        yield from _of_billing(row, request.records.get(event_id, {}), published)
    for event_id, records in sorted(request.records.items()):
        if event_id not in request.rows:
            yield Kind.RECORD_WITHOUT_ROW, f"{event_id} was billed as {sorted(records)}; no ledger row counts"


def _of_quota(request: _Request) -> Iterator[tuple[Kind, str]]:
    settlement = request.settlement
    emitted = sum(event.input_tokens + event.output_tokens for event in request.events.values())
    if settlement is None:
        yield Kind.NO_SETTLEMENT, f"{len(request.events)} events, {len(request.rows)} rows; the quota has no entry"
    elif settlement.ending is Ending.WITHDRAWN:
        if emitted:
            yield Kind.WITHDRAWN_BUT_BILLED, f"withdrawn, and {emitted} tokens were emitted"
    elif settlement.ending is Ending.SETTLED and not request.events:
        yield Kind.NO_EVENT, f"settled with {settlement.tokens} tokens; no event"
    elif settlement.ending is Ending.SETTLED and settlement.tokens != emitted:
        yield Kind.SETTLED_DIFFERS, f"settled with {settlement.tokens} tokens, emitted {emitted}"


def _of_billing(row: Recorded, records: Mapping[int, Billed], published: int) -> Iterator[tuple[Kind, str]]:
    record = records.get(row.sequence)
    if record is None:
        if row.sequence <= published:
            yield Kind.NO_RECORD, f"row {row.sequence} of {row.event_id} is not in the billing stream"
        return
    if (record.input_tokens, record.output_tokens, record.amount) != (row.input_tokens, row.output_tokens, row.amount):
        yield (
            Kind.RECORD_DIFFERS,
            f"row {row.sequence}: {_tokens(row)} for {row.amount}; billed {_tokens(record)} for {record.amount}",
        )


def _tokens(entry: Emitted | Recorded | Billed) -> str:
    return f"{entry.input_tokens}+{entry.output_tokens} tokens"

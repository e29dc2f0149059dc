"""What one request attempt consumed, as plain facts, and what makes a usage event acceptable.

The wire form is `roundhouse.v1.UsageEvent` (CloudEvents 1.0 attributes and data); adapters convert it once. Facts never
hold a prompt, a completion or a key (invariant 16).
"""

from enum import StrEnum
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec import Struct

from roundhouse.vocabulary import Outcome, PriorityClass

EVENT_TYPE: Final = "roundhouse.usage.v1"
TEXT_CHARACTERS_MAX: Final = 1024  # a guess, far above every name in the catalogue: keeps one event from filling a page
TIME_MS_END: Final = 253_402_300_800_000  # 10000-01-01 UTC: later instants have no ISO 8601 date of four digits
COUNT_MAX: Final = 2**32 - 1  # the wire's uint32


class Emitter(StrEnum):
    """Who wrote an event. A gateway saw the stream; a scheduler only knows the last heartbeat."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"


class EventKey(NamedTuple):
    """What makes an event unique. The tenant is part of it: one tenant's id never hides another's (case B36)."""

    event_id: str
    tenant_id: str
    source: str


class UsageFacts(Struct, frozen=True, gc=False):
    """One usage event. Times are milliseconds; `time_ms` is the completion, since the Unix epoch (UTC).

    A struct and not a dataclass, like all that is made for every event: it is made and compared several times faster
    (docs/decisions/0073-throughput.md)."""

    event_id: str
    tenant_id: str
    source: str
    time_ms: int
    request_id: str
    attempt: int
    key_id: str
    model: str
    model_digest: str
    adapter: str
    adapter_digest: str
    priority_class: PriorityClass
    outcome: Outcome
    status: int
    finish_reason: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    counted_by: str
    queue_ms: int
    stage_ms: int
    load_ms: int
    first_token_ms: int
    total_ms: int
    run_ms: int
    node_id: str
    operation: str
    emitter: str
    corrects_id: str

    @property
    def key(self) -> EventKey:
        """The identity of the event."""
        return EventKey(self.event_id, self.tenant_id, self.source)


_REQUIRED: Final = ("event_id", "tenant_id", "source", "request_id", "model")
_TEXTS: Final = (
    *_REQUIRED,
    "key_id",
    "model_digest",
    "adapter",
    "adapter_digest",
    "finish_reason",
    "counted_by",
    "node_id",
    "operation",
)
_COUNTS: Final = (
    "attempt",
    "status",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "queue_ms",
    "stage_ms",
    "load_ms",
    "first_token_ms",
    "total_ms",
    "run_ms",
)


_read_counts = attrgetter(*_COUNTS)
_read_texts = attrgetter(*_TEXTS)


def fault_of(facts: UsageFacts) -> str | None:
    """Why the event cannot be recorded; None if it can. The text names fields and numbers, never contents."""
    if facts.emitter not in (Emitter.GATEWAY, Emitter.SCHEDULER):
        return "emitter is neither gateway nor scheduler"
    if facts.corrects_id:
        return "corrects_id is set by the ledger, not by emitters"
    if not 0 < facts.time_ms < TIME_MS_END:
        return f"time_unix_ms is out of range: {facts.time_ms}"
    if facts.cached_tokens > facts.input_tokens:
        return f"cached_tokens exceed input_tokens: {facts.cached_tokens} > {facts.input_tokens}"
    return _count_fault(facts) or _text_fault(facts)


def _count_fault(facts: UsageFacts) -> str | None:
    counts = _read_counts(facts)
    if min(counts) >= 0 and max(counts) <= COUNT_MAX:
        return None  # the usual case; this runs for every event
    for name in _COUNTS:
        value = getattr(facts, name)
        if not 0 <= value <= COUNT_MAX:
            return f"{name} is out of range: {value}"
    return None


def _text_fault(facts: UsageFacts) -> str | None:
    texts = _read_texts(facts)
    whole = "".join(texts)
    if len(whole) <= TEXT_CHARACTERS_MAX and "\x00" not in whole and all(texts[: len(_REQUIRED)]):
        return None  # the usual case; this runs for every event
    for name in _TEXTS:
        text = getattr(facts, name)
        if len(text) > TEXT_CHARACTERS_MAX:
            return f"{name} is longer than {TEXT_CHARACTERS_MAX} characters"
        if "\x00" in text:  # PostgreSQL cannot store it
            return f"{name} holds a NUL character"
    for name in _REQUIRED:
        if not getattr(facts, name):
            return f"{name} is empty"
    return None

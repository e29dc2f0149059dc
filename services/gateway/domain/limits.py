"""The limits of one tenant as pure arithmetic: the twin of admission.lua, settle.lua and renew.lua.

The scripts decide in production; this decides in the fake and in the simulator, and a property test holds them together
on a real store. A rate limit is a leaky bucket used as a meter, the other form of GCRA (ITU-T I.371, annex A): a use of
n units adds n × 60,000 points, a limit of R a minute drains R points a millisecond and holds R × 60,000. All whole
numbers, so a limit of 7 a minute lets exactly 7 through at once; exact below 2^53 in Lua too, so for limits up to 1e11.
Refused changes nothing (invariant 15). Decision: docs/decisions/0082-admission.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

POINTS_PER_UNIT = 60_000  # milliseconds in a minute, so that R a minute drains R points a millisecond
LEASE_MS = 30_000  # a gateway that died gives its concurrency back within this time (case B10)
CONCURRENCY_RETRY_MS = 1_000  # a guess: nobody knows when a running request ends


class LimitName(StrEnum):
    """Which limit refused, as the catalogue names it."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "concurrent_requests"


@dataclass(frozen=True, slots=True)
class Meter:
    """What was used and has not drained yet."""

    points: int = 0
    at_ms: int = 0

    def at(self, now_ms: int, rate: int) -> "Meter":
        """The same meter at `now_ms`; a clock that went back drains nothing."""
        elapsed_ms = max(0, now_ms - self.at_ms)
        return Meter(max(0, self.points - rate * elapsed_ms), max(self.at_ms, now_ms))

    def plus(self, points: int) -> "Meter":
        """With `points` more, or fewer if negative, but never below empty."""
        return replace(self, points=max(0, self.points + points))


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants; None = no such limit."""

    request_id: str
    reserve_tokens: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None


@dataclass(frozen=True, slots=True)
class Room:
    """What is left after a request was admitted; None = no such limit."""

    remaining_requests: int | None
    remaining_tokens: int | None
    reset_requests_ms: int
    reset_tokens_ms: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an admitted request holds, and where it stood in each meter when it came."""

    ask: Ask
    at_ms: int
    request_points_before: int
    token_points_before: int
    room: Room


@dataclass(frozen=True, slots=True)
class Taken:
    """Admitted."""

    room: Room


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted, nothing taken. `retry_after_ms` None: this request never fits the limit."""

    limit: LimitName
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True)
class Ended:
    """This request id was settled or withdrawn before; nothing taken."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Everything that is counted for one tenant."""

    requests: Meter = Meter()
    tokens: Meter = Meter()
    leases: Mapping[str, int] = field(default_factory=dict)  # request id → expires at, ms
    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    def running(self, now_ms: int) -> int:
        """Concurrency leases that have not run out."""
        return sum(1 for expires_ms in self.leases.values() if expires_ms > now_ms)


def admit(use: TenantUse, ask: Ask, now_ms: int) -> tuple[TenantUse, Taken | Refused | Ended]:
    """Take everything or nothing. Idempotent by request id."""
    if ask.request_id in use.ended:
        return use, Ended()
    if ask.request_id in use.tickets:
        return use, Taken(use.tickets[ask.request_id].room)
    requests = use.requests.at(now_ms, ask.requests_per_minute or 0)
    tokens = use.tokens.at(now_ms, ask.tokens_per_minute or 0)
    refused = _refusal(ask, requests, tokens, use.running(now_ms))
    if refused is not None:
        return use, refused
    before = (requests.points, tokens.points)
    requests_after = _charged(use.requests, requests, ask.requests_per_minute, 1)
    tokens_after = _charged(use.tokens, tokens, ask.tokens_per_minute, ask.reserve_tokens)
    room = _room(ask, requests_after, tokens_after)
    ticket = Ticket(ask, now_ms, *before, room)
    after = replace(
        use,
        requests=requests_after,
        tokens=tokens_after,
        leases={**use.leases, ask.request_id: now_ms + LEASE_MS},
        tickets={**use.tickets, ask.request_id: ticket},
    )
    return after, Taken(room)


def settle(use: TenantUse, request_id: str, used_tokens: int, now_ms: int) -> TenantUse:
    """Charge what was used instead of what was reserved, and end the lease. Idempotent."""
    return _end(use, request_id, used_tokens, now_ms, withdraw=False)


def withdraw(use: TenantUse, request_id: str, now_ms: int) -> TenantUse:
    """Undo an admission, the request count too; one that arrives later finds itself ended. Idempotent."""
    return _end(use, request_id, 0, now_ms, withdraw=True)


def renew(use: TenantUse, request_id: str, now_ms: int) -> TenantUse:
    """Let the lease of a request that has not ended run `LEASE_MS` from now. Idempotent."""
    if request_id not in use.tickets:
        return use
    return replace(use, leases={**use.leases, request_id: now_ms + LEASE_MS})


def give_back_points(before: int, cost: int, kept: int, drained: int) -> int:
    """How many of `cost` points that were put on top of `before` can be taken off again if only `kept` were needed.

    The bucket drains from the bottom, so what lies above both `kept` and the drained level is still in it. Points that
    have drained meanwhile are not given back: they would be credit for time in which nothing was used."""
    return max(0, before + cost - max(drained, before + kept))


def _refusal(ask: Ask, requests: Meter, tokens: Meter, running: int) -> Refused | None:
    refusals = [
        _rate_refusal(LimitName.REQUESTS, requests, ask.requests_per_minute, 1),
        _rate_refusal(LimitName.TOKENS, tokens, ask.tokens_per_minute, ask.reserve_tokens),
    ]
    if ask.concurrent_requests is not None and running >= ask.concurrent_requests:
        wait_ms = CONCURRENCY_RETRY_MS if ask.concurrent_requests > 0 else None
        refusals.append(Refused(LimitName.CONCURRENT, wait_ms))
    found = [refusal for refusal in refusals if refusal is not None]
    return max(found, key=lambda refusal: _never_last(refusal.retry_after_ms), default=None)


def _never_last(wait_ms: int | None) -> tuple[bool, int]:
    return wait_ms is None, wait_ms or 0


def _rate_refusal(limit: LimitName, meter: Meter, rate: int | None, units: int) -> Refused | None:
    if rate is None or units == 0:
        return None  # what takes nothing of a limit is not refused by it
    cost, capacity = units * POINTS_PER_UNIT, rate * POINTS_PER_UNIT
    if cost > capacity:
        return Refused(limit, None)
    missing = meter.points + cost - capacity
    return Refused(limit, -(-missing // rate)) if missing > 0 else None


def _charged(untouched: Meter, drained: Meter, rate: int | None, units: int) -> Meter:
    return untouched if rate is None else drained.plus(units * POINTS_PER_UNIT)


def _room(ask: Ask, requests: Meter, tokens: Meter) -> Room:
    remaining_requests, reset_requests_ms = _left(requests, ask.requests_per_minute)
    remaining_tokens, reset_tokens_ms = _left(tokens, ask.tokens_per_minute)
    return Room(remaining_requests, remaining_tokens, reset_requests_ms, reset_tokens_ms)


def _left(meter: Meter, rate: int | None) -> tuple[int | None, int]:
    if rate is None:
        return None, 0
    room = max(0, rate * POINTS_PER_UNIT - meter.points) // POINTS_PER_UNIT
    return room, -(-meter.points // rate) if rate else 0


def _end(use: TenantUse, request_id: str, used_tokens: int, now_ms: int, *, withdraw: bool) -> TenantUse:
    leases = {key: value for key, value in use.leases.items() if key != request_id}
    ticket = use.tickets.get(request_id)
    if ticket is None:
        ended = use.ended | {request_id} if withdraw else use.ended
        return replace(use, leases=leases, ended=ended)
    return replace(
        use,
        requests=_requests_after(use.requests, ticket, now_ms) if withdraw else use.requests,
        tokens=_tokens_after(use.tokens, ticket, used_tokens, now_ms),
        leases=leases,
        tickets={key: value for key, value in use.tickets.items() if key != request_id},
        ended=use.ended | {request_id},
    )


def _requests_after(meter: Meter, ticket: Ticket, now_ms: int) -> Meter:
    rate = ticket.ask.requests_per_minute
    if rate is None:
        return meter
    drained = rate * max(0, now_ms - ticket.at_ms)
    back = give_back_points(ticket.request_points_before, POINTS_PER_UNIT, 0, drained)
    return meter.at(now_ms, rate).plus(-back)


def _tokens_after(meter: Meter, ticket: Ticket, used_tokens: int, now_ms: int) -> Meter:
    rate = ticket.ask.tokens_per_minute
    if rate is None:
        return meter
    reserved, used = ticket.ask.reserve_tokens * POINTS_PER_UNIT, used_tokens * POINTS_PER_UNIT
    now = meter.at(now_ms, rate)
    if used >= reserved:
        return now.plus(used - reserved)
    drained = rate * max(0, now_ms - ticket.at_ms)
    return now.plus(-give_back_points(ticket.token_points_before, reserved, used, drained))

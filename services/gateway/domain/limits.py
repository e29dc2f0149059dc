"""The limits of a tenant, its keys and its models as pure arithmetic: twin of admission.lua, settle.lua and renew.lua.

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
class ScopedLimits:
    """Limits of one scope: `""` is the tenant itself, `k:<key id>` a key, `m:<name>` a model. None = no such limit."""

    scope: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def limits_nothing(self) -> bool:
        """Whether there is nothing to count."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests) == (None, None, None)


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants; None = no such limit. `also` are the scopes beside the tenant's own, each once."""

    request_id: str
    reserve_tokens: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    also: tuple[ScopedLimits, ...] = ()

    @property
    def scopes(self) -> tuple[ScopedLimits, ...]:
        """Every scope, the tenant's first."""
        own = ScopedLimits("", self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        return (own, *self.also)


@dataclass(frozen=True, slots=True)
class Room:
    """What is left after a request was admitted, in the scope with least left; None = no such limit."""

    remaining_requests: int | None
    remaining_tokens: int | None
    reset_requests_ms: int
    reset_tokens_ms: int
    requests_limit: int | None = None
    tokens_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """Where the meters of one scope stood when a request came."""

    limits: ScopedLimits
    request_points: int
    token_points: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an admitted request holds, and where it stood in each meter when it came."""

    ask: Ask
    at_ms: int
    before: tuple[Before, ...]
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
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """This request id was settled or withdrawn before; nothing taken."""


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """What is counted for one scope."""

    requests: Meter = Meter()
    tokens: Meter = Meter()
    leases: Mapping[str, int] = field(default_factory=dict)  # request id → expires at, ms

    def running(self, now_ms: int) -> int:
        """Concurrency leases that have not run out."""
        return sum(1 for expires_ms in self.leases.values() if expires_ms > now_ms)


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Everything that is counted for one tenant."""

    scopes: Mapping[str, ScopeUse] = field(default_factory=dict)
    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    def of(self, scope: str) -> ScopeUse:
        """What is counted for a scope; nothing yet for one that was never used."""
        return self.scopes.get(scope, ScopeUse())

    @property
    def requests(self) -> Meter:
        """The tenant's own requests."""
        return self.of("").requests

    @property
    def tokens(self) -> Meter:
        """The tenant's own tokens."""
        return self.of("").tokens

    @property
    def leases(self) -> Mapping[str, int]:
        """The tenant's own leases."""
        return self.of("").leases

    def running(self, now_ms: int) -> int:
        """Concurrency leases of the tenant that have not run out."""
        return self.of("").running(now_ms)


def admit(use: TenantUse, ask: Ask, now_ms: int) -> tuple[TenantUse, Taken | Refused | Ended]:
    """Take everything in every scope, or nothing. Idempotent by request id."""
    if ask.request_id in use.ended:
        return use, Ended()
    if ask.request_id in use.tickets:
        return use, Taken(use.tickets[ask.request_id].room)
    refusals: list[Refused] = []
    scopes, before = dict(use.scopes), []
    room = Room(None, None, 0, 0)
    for wanted in ask.scopes:
        counted = use.of(wanted.scope)
        requests = counted.requests.at(now_ms, wanted.requests_per_minute or 0)
        tokens = counted.tokens.at(now_ms, wanted.tokens_per_minute or 0)
        refusals += _refusals(wanted, ask.reserve_tokens, requests, tokens, counted.running(now_ms))
        before.append(Before(wanted, requests.points, tokens.points))
        after = ScopeUse(
            _charged(counted.requests, requests, wanted.requests_per_minute, 1),
            _charged(counted.tokens, tokens, wanted.tokens_per_minute, ask.reserve_tokens),
            {**counted.leases, ask.request_id: now_ms + LEASE_MS},
        )
        scopes[wanted.scope] = after
        room = _narrower(room, wanted, after)
    if refusals:
        return use, max(refusals, key=lambda refusal: _never_last(refusal.retry_after_ms))
    ticket = Ticket(ask, now_ms, tuple(before), room)
    return replace(use, scopes=scopes, tickets={**use.tickets, ask.request_id: ticket}), Taken(room)


def settle(use: TenantUse, request_id: str, used_tokens: int, now_ms: int) -> TenantUse:
    """Charge what was used instead of what was reserved, and end the lease. Idempotent."""
    return _end(use, request_id, used_tokens, now_ms, withdraw=False)


def withdraw(use: TenantUse, request_id: str, now_ms: int) -> TenantUse:
    """Undo an admission, the request count too; one that arrives later finds itself ended. Idempotent."""
    return _end(use, request_id, 0, now_ms, withdraw=True)


def renew(use: TenantUse, request_id: str, now_ms: int) -> TenantUse:
    """Let the leases of a request that has not ended run `LEASE_MS` from now. Idempotent."""
    ticket = use.tickets.get(request_id)
    if ticket is None:
        return use
    scopes = dict(use.scopes)
    for one in ticket.before:
        counted = use.of(one.limits.scope)
        scopes[one.limits.scope] = replace(counted, leases={**counted.leases, request_id: now_ms + LEASE_MS})
    return replace(use, scopes=scopes)


def give_back_points(before: int, cost: int, kept: int, drained: int) -> int:
    """How many of `cost` points that were put on top of `before` can be taken off again if only `kept` were needed.

    The bucket drains from the bottom, so what lies above both `kept` and the drained level is still in it. Points that
    have drained meanwhile are not given back: they would be credit for time in which nothing was used."""
    return max(0, before + cost - max(drained, before + kept))


def _refusals(
    limits: ScopedLimits, tokens: int, requests_meter: Meter, tokens_meter: Meter, running: int
) -> list[Refused]:
    found = [
        _rate_refusal(limits.scope, LimitName.REQUESTS, requests_meter, limits.requests_per_minute, 1),
        _rate_refusal(limits.scope, LimitName.TOKENS, tokens_meter, limits.tokens_per_minute, tokens),
    ]
    if limits.concurrent_requests is not None and running >= limits.concurrent_requests:
        wait_ms = CONCURRENCY_RETRY_MS if limits.concurrent_requests > 0 else None
        found.append(Refused(LimitName.CONCURRENT, wait_ms, limits.scope))
    return [refusal for refusal in found if refusal is not None]


def _never_last(wait_ms: int | None) -> tuple[bool, int]:
    return wait_ms is None, wait_ms or 0


def _rate_refusal(scope: str, limit: LimitName, meter: Meter, rate: int | None, units: int) -> Refused | None:
    if rate is None or units == 0:
        return None  # what takes nothing of a limit is not refused by it
    cost, capacity = units * POINTS_PER_UNIT, rate * POINTS_PER_UNIT
    if cost > capacity:
        return Refused(limit, None, scope)
    missing = meter.points + cost - capacity
    return Refused(limit, -(-missing // rate), scope) if missing > 0 else None


def _charged(untouched: Meter, drained: Meter, rate: int | None, units: int) -> Meter:
    return untouched if rate is None else drained.plus(units * POINTS_PER_UNIT)


def _narrower(room: Room, limits: ScopedLimits, after: ScopeUse) -> Room:
    """What callers are told: of each limit the scope with least left, the first of equals."""
    requests, reset_requests_ms = _left(after.requests, limits.requests_per_minute)
    if requests is not None and (room.remaining_requests is None or requests < room.remaining_requests):
        room = replace(
            room,
            remaining_requests=requests,
            reset_requests_ms=reset_requests_ms,
            requests_limit=limits.requests_per_minute,
        )
    tokens, reset_tokens_ms = _left(after.tokens, limits.tokens_per_minute)
    if tokens is not None and (room.remaining_tokens is None or tokens < room.remaining_tokens):
        room = replace(
            room, remaining_tokens=tokens, reset_tokens_ms=reset_tokens_ms, tokens_limit=limits.tokens_per_minute
        )
    return room


def _left(meter: Meter, rate: int | None) -> tuple[int | None, int]:
    if rate is None:
        return None, 0
    room = max(0, rate * POINTS_PER_UNIT - meter.points) // POINTS_PER_UNIT
    return room, -(-meter.points // rate) if rate else 0


def _end(use: TenantUse, request_id: str, used_tokens: int, now_ms: int, *, withdraw: bool) -> TenantUse:
    ticket = use.tickets.get(request_id)
    if ticket is None:
        ended = use.ended | {request_id} if withdraw else use.ended
        return replace(use, scopes={**use.scopes, "": _without_lease(use.of(""), request_id)}, ended=ended)
    scopes = dict(use.scopes)
    for before in ticket.before:
        counted = _without_lease(use.of(before.limits.scope), request_id)
        scopes[before.limits.scope] = replace(
            counted,
            requests=_requests_after(counted.requests, ticket, before, now_ms) if withdraw else counted.requests,
            tokens=_tokens_after(counted.tokens, ticket, before, used_tokens, now_ms),
        )
    tickets = {key: value for key, value in use.tickets.items() if key != request_id}
    return replace(use, scopes=scopes, tickets=tickets, ended=use.ended | {request_id})


def _without_lease(counted: ScopeUse, request_id: str) -> ScopeUse:
    return replace(counted, leases={key: value for key, value in counted.leases.items() if key != request_id})


def _requests_after(meter: Meter, ticket: Ticket, before: Before, now_ms: int) -> Meter:
    rate = before.limits.requests_per_minute
    if rate is None:
        return meter
    drained = rate * max(0, now_ms - ticket.at_ms)
    back = give_back_points(before.request_points, POINTS_PER_UNIT, 0, drained)
    return meter.at(now_ms, rate).plus(-back)


def _tokens_after(meter: Meter, ticket: Ticket, before: Before, used_tokens: int, now_ms: int) -> Meter:
    rate = before.limits.tokens_per_minute
    if rate is None:
        return meter
    reserved, used = ticket.ask.reserve_tokens * POINTS_PER_UNIT, used_tokens * POINTS_PER_UNIT
    now = meter.at(now_ms, rate)
    if used >= reserved:
        return now.plus(used - reserved)
    drained = rate * max(0, now_ms - ticket.at_ms)
    return now.plus(-give_back_points(before.token_points, reserved, used, drained))

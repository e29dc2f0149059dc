"""What the operations about money need of the world: prices, periods, the books, webhooks.

Beside `ports`, which is what recording and publishing need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.metering.domain.costs import NodeHour, NodeUse
from services.metering.domain.ledger import Entry, LedgerRow
from services.metering.domain.prices import PriceBook, PriceRule
from services.metering.domain.rating import Rating
from services.metering.domain.statements import ClosedPeriod, Statement, Sums
from services.metering.domain.webhooks import Answer, Endpoint


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """A page of a period's books: entries of rows after a sequence and up to another, from at most `limit` rows."""

    period_ms: int
    upto: int
    tenant_id: str | None = None
    after: int = 0
    limit: int = 5_000


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Entries in ledger order; `next_after` continues, None at the end."""

    entries: tuple[Entry, ...]
    next_after: int | None


class Entries(Protocol):
    """The books of a period, entry by entry. Raises Unavailable while the database is away."""

    async def head(self) -> int:
        """The last sequence of the ledger."""
        ...

    async def page(self, query: EntryQuery) -> EntryPage:
        """One page."""
        ...


@dataclass(frozen=True, slots=True)
class RatingPage:
    """Rows of a period by their own time, [from_ms, to_ms), after a sequence, at most `limit` looked at."""

    from_ms: int
    to_ms: int
    after: int = 0
    limit: int = 1_000
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Rerated:
    """What one page came to. `changes` holds old and new rating of every row that is (or would be) corrected."""

    examined: int
    changes: tuple[tuple[Rating, Rating], ...]
    next_after: int | None  # None: there is nothing after it


class Accounts(Protocol):
    """Accounting periods: months, known by their start in milliseconds. Raises Unavailable while the database is away.

    Every answer is as of one instant, down to the last row that is committed."""

    async def close(self, period_ms: int, *, now_ms: int) -> ClosedPeriod:
        """Book nothing more in a month, and sign what it came to. Idempotent: closed again, it is what it was.

        Raises Conflict if the month is not over, or an earlier one in which something is booked is open."""
        ...

    async def closed(self) -> Sequence[ClosedPeriod]:
        """Every closed period, oldest first."""
        ...

    async def sums(self, period_ms: int) -> Sequence[tuple[str, Sums]]:
        """What a period comes to now, by pseudonym and currency, as in the signed document."""
        ...

    async def statement(self, tenant_id: str, period_ms: int) -> Statement:
        """What is booked for a tenant in a period; no lines if nothing is."""
        ...

    async def tenants(self, period_ms: int) -> Sequence[str]:
        """For whom anything is booked in a period, sorted."""
        ...


class Rerating(Protocol):
    """Corrections of rows that were rated at another price than holds now for their time."""

    async def rerate(self, page: RatingPage, book: PriceBook, *, now_ms: int) -> Rerated:
        """Correct one page of rows; nothing is written if the page is a dry run. Idempotent. Raises Unavailable."""
        ...


class PriceStore(Protocol):
    """Every version of every price, in the ledger's database. Raises Unavailable while that is away."""

    async def rules(self) -> Sequence[PriceRule]:
        """All of them."""
        ...

    async def add(self, rules: Sequence[PriceRule], *, now_ms: int) -> int:
        """Write new versions; how many were. One whose selector and instant are taken is left as it is."""
        ...


class Pricing(Protocol):
    """What rates events."""

    async def book(self) -> PriceBook:
        """The prices as they are known now. Raises Unavailable before the first catalogue."""
        ...


@dataclass(frozen=True, slots=True)
class WebhookRows:
    """Rows for an endpoint, oldest first; after them there is nothing for it up to `upto`."""

    rows: tuple[LedgerRow, ...]
    upto: int


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A record that an endpoint did not take."""

    sequence: int
    reason: str
    failed_ms: int


class WebhookStore(Protocol):
    """Webhook endpoints, in the ledger's database. Raises Unavailable while that is away."""

    async def add(self, endpoint: Endpoint) -> None:
        """A new endpoint."""
        ...

    async def remove(self, endpoint_id: str) -> bool:
        """Forget an endpoint and its dead records; whether there was one. Idempotent."""
        ...

    async def endpoints(self) -> Sequence[Endpoint]:
        """All of them, oldest first."""
        ...

    async def head(self) -> int:
        """The last sequence of the ledger."""
        ...

    async def claim(self, holder: str, *, now_ms: int, lease_ms: int) -> Sequence[Endpoint]:
        """Endpoints with something to send now, for this holder until its lease ends."""
        ...

    async def rows_after(self, endpoint: Endpoint, *, limit: int) -> WebhookRows:
        """What the endpoint gets next."""
        ...

    async def note(self, endpoint: Endpoint, holder: str) -> None:
        """How far it is, and when to go on. Ignored if another holder has it by now."""
        ...

    async def bury(self, endpoint: Endpoint, sequence: int, reason: str, *, now_ms: int) -> None:
        """Put a record aside. Idempotent."""
        ...

    async def dead(self, endpoint_id: str) -> Sequence[DeadRecord]:
        """Records that were put aside, oldest first."""
        ...

    async def send_again(self, endpoint_id: str, sequence: int) -> bool:
        """Go back to a sequence and switch the endpoint on; whether there is one. Dead records from there on go too."""
        ...


class WebhookPoster(Protocol):
    """The way out to addresses that others chose."""

    def fault_of(self, url: str) -> str | None:
        """Why an address can never be posted to; None if it may."""
        ...

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """One attempt, bounded in time. Never raises but when cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Erased:
    """Under which pseudonym a tenant's sums are from now on, and how many rows were renamed by this call."""

    pseudonym: str
    rows: int


class Forgetting(Protocol):
    """What the ledger lets go of. Raises Unavailable while the database is away. Sums never change."""

    async def erase(self, tenant_id: str, *, now_ms: int) -> Erased:
        """Replace a tenant by its pseudonym everywhere; its later events are recorded under that. Idempotent."""
        ...

    async def remove(self, tenant_id: str, *, before_ms: int) -> int:
        """Remove single rows of closed periods from before an instant, if they were published; how many. Idempotent."""
        ...


class StreamErasure(Protocol):
    """The streams, for an erasure."""

    async def erase(self, tenant_id: str) -> None:
        """Remove what is recorded of a tenant. Idempotent. Raises Unavailable."""
        ...


class NodeHours(Protocol):
    """Where nodes were seen, in the ledger's database. Raises Unavailable while that is away."""

    async def merge(self, hours: Sequence[NodeHour]) -> None:
        """Add sightings to what is known. Idempotent."""
        ...

    async def between(self, from_ms: int, to_ms: int) -> tuple[Sequence[NodeHour], Sequence[NodeUse]]:
        """Sightings, and what ran, in the hours that begin in [from_ms, to_ms)."""
        ...

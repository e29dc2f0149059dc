"""What metering's operations need of the world. Adapters implement these; tests pass fakes.

Each fake passes the contract suite of the real adapter (`tests/contract/test_ledger.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from msgspec import Struct

from roundhouse.catalogue.records import Catalogue
from roundhouse.wire.v1 import usage_pb2
from services.metering.domain.budgets import NO_SCOPES, Scopes, SpendRow, SpendSums
from services.metering.domain.ledger import Candidate, LedgerRow, RawEvent, Rejected, Result
from services.metering.domain.queries import Dimension, GroupKey, GroupPage, Reconciliation, RowPage, UsageFilter
from services.metering.domain.reconciling import Billed, Emitted, Kind, Settlement
from services.metering.domain.usage import UsageFacts


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One event that was put aside. `fingerprint` is the SHA-256 of its subject and bytes, hex."""

    fingerprint: str
    raw: RawEvent
    reason: str
    first_seen_ms: int
    replayed_ms: int | None


@dataclass(frozen=True, slots=True)
class Publication:
    """How far the billing stream is: the last sequence that it has, and how often it was begun again."""

    sequence: int
    turn: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The next rows for the billing stream, oldest first, and the turn in which they are published."""

    rows: Sequence[LedgerRow] = ()
    turn: int = 0


class Ledger(Protocol):
    """Rows of usage, each event once. Every method raises Unavailable while the database is away."""

    async def append(self, items: Sequence[Candidate | Rejected], *, now_ms: int) -> Sequence[Result]:
        """Record a batch by the rules of `domain.ledger`, all in one transaction; one result an item, in order.

        Durable when it returns. Idempotent. Cancelled: it may or may not have happened. Raises InvalidInput if the
        database refuses a value of some item; then nothing of the batch is recorded."""
        ...

    async def fold(self, *, least: int) -> int:
        """Add the next rows to the hourly sums, if at least `least` wait; how many were added. Changes no answer."""
        ...

    async def claim_unpublished(self, holder: str, *, now_ms: int, lease_ms: int, limit: int) -> Claimed:
        """What is to be published next; nothing while another holder's lease runs."""
        ...

    async def mark_published(self, holder: str, *, sequence: int, turn: int) -> None:
        """The billing stream has every row up to `sequence`. Idempotent; ignored if the holder lost its lease, or if
        publishing was begun again after that `turn`."""
        ...

    async def publication(self) -> Publication:
        """How far the billing stream is."""
        ...

    async def publish_again(self, *, after: int, unless_erased: bool = False) -> int:
        """Publish every row after a sequence once more; how many were published before. 0 if there are none, and, if
        so wanted, if all of them belong to erased tenants: their records are missing on purpose."""
        ...

    async def unpublished(self) -> int:
        """How many rows the billing stream does not have yet."""
        ...

    async def groups(
        self, where: UsageFilter, by: Sequence[Dimension], *, after: GroupKey | None, limit: int
    ) -> GroupPage:
        """Sums by group and currency, in the order of the group keys (texts by code point)."""
        ...

    async def rows(self, where: UsageFilter, *, after: int | None, limit: int) -> RowPage:
        """Single rows that nothing supersedes, in ledger order."""
        ...

    async def reconcile(self, where: UsageFilter) -> Reconciliation:
        """Totals, as of one instant."""
        ...

    async def erased(self, tenants: Collection[str]) -> frozenset[str]:
        """Those of `tenants` that were erased, and those that are pseudonyms of erased ones."""
        ...

    async def quarantined(self, *, limit: int, after: Quarantined | None = None) -> Sequence[Quarantined]:
        """Events put aside and not replayed yet, oldest first; those behind `after`, if it is given."""
        ...

    async def mark_replayed(self, fingerprint: str, *, now_ms: int) -> None:
        """The event was recorded after all. Idempotent."""
        ...


class Delivery(Struct, frozen=True):
    """One message of the usage stream, decoded. `payload` is a text (the reason) if it cannot be read.

    `token` is the adapter's own, for acknowledging."""

    payload: UsageFacts | str
    raw: RawEvent
    token: object


class UsageStream(Protocol):
    """The durable consumer of usage events."""

    async def pull(self, *, limit: int) -> Sequence[Delivery]:
        """Up to `limit` messages, as soon as there is one; none after about a second without any.

        Makes what a restarted server forgot again. Raises Unavailable while the bus is away."""
        ...

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Never deliver these again. Call after the effect is durable. A lost acknowledgement means a duplicate."""
        ...

    async def pending(self) -> int:
        """Messages that wait in the stream or are not acknowledged. Raises Unavailable."""
        ...


class BillingStream(Protocol):
    """Where rated records go."""

    async def publish(self, rows: Sequence[LedgerRow], *, turn: int = 0) -> int:
        """Publish rows in order; the sequence up to which the stream has all of them. Raises Unavailable if none.

        Another `turn` makes a record one that the stream does not know yet, whatever it had before.

        A row never enters the stream before its predecessor. Idempotent by the rows' idempotency keys."""
        ...

    async def last_sequence(self) -> int | None:
        """Ledger sequence of the stream's last record; 0 if it never had one; None if its records have expired.

        Raises Unavailable."""
        ...


class PriceSource(Protocol):
    """The catalogue, for its prices. `roundhouse.catalogue.store.CatalogueReader` is one."""

    @property
    def current(self) -> Catalogue:
        """The newest generation that is known; generation 0 = none. Never waits."""
        ...

    @property
    def not_ready_reason(self) -> str | None:
        """Why nothing is known yet; None once the store was read."""
        ...


class Observer(Protocol):
    """Who is told what happens: metrics and readiness."""

    def recorded(self, results: Sequence[Result], *, commit_ms: int) -> None:
        """One batch is durable."""
        ...

    def pending(self, events: int) -> None:
        """How many events wait in the usage stream."""
        ...

    def unpublished(self, rows: int) -> None:
        """How many rows the billing stream does not have yet."""
        ...

    def condition(self, name: str, *, reason: str | None) -> None:
        """A condition of readiness holds (`reason` None) or why it does not."""
        ...


class SpendPage(Struct, frozen=True):
    """Some ledger rows as they bear on budgets, and the last sequence of the ledger when they were read."""

    head: int
    rows: tuple[SpendRow, ...]


class SpendLedger(Protocol):
    """The ledger, as budgets read it. Raises Unavailable while the database is away."""

    async def following(self, sequence: int, *, limit: int) -> SpendPage:
        """The rows after `sequence`, in order."""
        ...

    async def sums(self, now_ms: int, scopes: Scopes = NO_SCOPES) -> tuple[int, SpendSums]:
        """The last sequence, and the sums of the month and the day that hold `now_ms` up to it, as of one instant."""
        ...


class TenantSpend(Struct, frozen=True):
    """What one tenant, or one scope of it, has spent as of a ledger row, and the requests whose rows are new in it."""

    tenant_id: str
    sequence: int
    sums: dict[tuple[str, str], Decimal]  # (period, currency) → amount, of every period that is not over
    counted: tuple[tuple[int, str], ...] = ()  # (sequence of the row, request id)
    scope: str = ""


class BudgetStore(Protocol):
    """Where gateways read what was spent. Raises Unavailable while it is away."""

    async def write(self, spends: Sequence[TenantSpend]) -> None:
        """Tell what tenants have spent. Idempotent, and never goes back to an earlier sequence."""
        ...

    async def key_scopes(self) -> Mapping[str, tuple[str, str]]:
        """The keys that have a budget of their own: id → tenant and scope."""
        ...

    async def known(self) -> int | None:
        """The sequence of `remember`; None if the store lost it, and so perhaps everything."""
        ...

    async def remember(self, sequence: int) -> None:
        """Every tenant was told everything up to `sequence`."""
        ...


class BudgetAlerts(Protocol):
    """Where it is told that a budget is used up to a share."""

    async def tell(self, alert: usage_pb2.BudgetAlert) -> bool:
        """Tell it unless it was told before; whether it was told now. Raises Unavailable."""
        ...


class ReconcilingSources(Protocol):
    """The books beside the ledger. Raises Unavailable while one of them is away."""

    async def begin(self, until_ms: int, *, every_ms: int) -> int | None:
        """Take the turn to compare up to `until_ms`; from when on. None: it is too early, or another process's turn."""
        ...

    async def done(self, until_ms: int) -> None:
        """Everything before `until_ms` was compared."""
        ...

    async def settlements(self, tenants: Collection[str], from_ms: int, to_ms: int) -> Sequence[Settlement]:
        """What the quota says of requests that ended in a window, and of those that nobody settled yet."""
        ...

    async def emitted(self, from_ms: int, to_ms: int) -> Sequence[Emitted]:
        """Usage events of a window, by their own time."""
        ...

    async def billed(self, from_ms: int, to_ms: int) -> Sequence[Billed]:
        """Rated records of a window, by the time of their event."""
        ...


class ReconcilingObserver(Protocol):
    """Who hears how the hourly comparison went."""

    def reconciled(self, until_ms: int, differences: Mapping[Kind, int]) -> None:
        """Everything before `until_ms` was compared."""
        ...

    def engines_compared(self, models: int) -> None:
        """An hour of the engines' own counts was compared; so many models differ."""
        ...


class EngineCounters(Protocol):
    """What engines have counted by themselves."""

    async def read(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """(server, Triton's name of a model) → input and output tokens since it was loaded.

        A server that does not answer is left out; never raises for it."""
        ...

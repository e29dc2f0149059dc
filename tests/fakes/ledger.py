"""The ledger in memory, deciding with the same domain code; passes `tests/contract/test_ledger.py` as the real ones do.

`away = True` makes every call fail as a lost database does.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256

from msgspec import structs

from roundhouse.errors import Unavailable
from services.metering.domain.forgetting import is_pseudonym
from services.metering.domain.ledger import Books, Candidate, LedgerRow, RawEvent, Rejected, Result, plan_batch
from services.metering.domain.periods import day_start_ms, hour_start_ms
from services.metering.domain.queries import (
    Dimension,
    GroupKey,
    GroupPage,
    GroupValue,
    Reconciliation,
    RowPage,
    Totals,
    UsageFilter,
    UsageGroup,
)
from services.metering.ports import Claimed, Publication, Quarantined

_VALUES: dict[Dimension, Callable[[LedgerRow], GroupValue]] = {
    Dimension.TENANT: lambda row: row.facts.tenant_id,
    Dimension.MODEL: lambda row: row.facts.model,
    Dimension.ADAPTER: lambda row: row.facts.adapter,
    Dimension.CLASS: lambda row: row.facts.priority_class.value,
    Dimension.KEY: lambda row: row.facts.key_id,
    Dimension.DAY: lambda row: day_start_ms(row.facts.time_ms),
    Dimension.HOUR: lambda row: hour_start_ms(row.facts.time_ms),
}


class FakeLedger:
    """See `ports.Ledger`."""

    def __init__(self) -> None:
        self.away = False
        self._rows: list[LedgerRow] = []
        self._successors: dict[int, int] = {}
        self._quarantine: dict[str, Quarantined] = {}
        self._published = 0
        self._turn = 0
        self._holder = ""
        self._lease_until_ms = 0

    async def append(self, items: Sequence[Candidate | Rejected], *, now_ms: int) -> Sequence[Result]:
        """See `Ledger.append`."""
        self._answer()
        plan = plan_batch(items, self._rows, Books(len(self._rows)), now_ms=now_ms)
        self._rows += plan.rows
        self._successors |= plan.successors
        for rejected in plan.quarantined:
            name = _fingerprint(rejected.raw)
            self._quarantine.setdefault(name, Quarantined(name, rejected.raw, rejected.reason, now_ms, None))
        return plan.results

    async def fold(self, *, least: int) -> int:
        """See `Ledger.fold`: here sums are made when they are asked for."""
        self._answer()
        return 0

    async def claim_unpublished(self, holder: str, *, now_ms: int, lease_ms: int, limit: int) -> Claimed:
        """See `Ledger.claim_unpublished`."""
        if not await self.unpublished() or (self._holder != holder and self._lease_until_ms > now_ms):
            return Claimed()
        self._holder, self._lease_until_ms = holder, now_ms + lease_ms
        rows = self._rows[self._published : self._published + limit]
        return Claimed([self._with_credit(row) for row in rows], self._turn)

    def _with_credit(self, row: LedgerRow) -> LedgerRow:
        if row.corrects_sequence is None:
            return row
        return structs.replace(row, credit=self._rows[row.corrects_sequence - 1].rating)

    async def mark_published(self, holder: str, *, sequence: int, turn: int) -> None:
        """See `Ledger.mark_published`."""
        self._answer()
        if (holder, turn) == (self._holder, self._turn):
            self._published = max(self._published, sequence)

    async def publication(self) -> Publication:
        """See `Ledger.publication`."""
        self._answer()
        return Publication(self._published, self._turn)

    async def publish_again(self, *, after: int, unless_erased: bool = False) -> int:
        """See `Ledger.publish_again`."""
        self._answer()
        again = max(0, self._published - after)
        if again:
            self._published, self._turn = after, self._turn + 1
        return again

    async def unpublished(self) -> int:
        """See `Ledger.unpublished`."""
        self._answer()
        return len(self._rows) - self._published

    async def groups(
        self, where: UsageFilter, by: Sequence[Dimension], *, after: GroupKey | None, limit: int
    ) -> GroupPage:
        """See `Ledger.groups`."""
        grouped: dict[GroupKey, list[LedgerRow]] = {}
        for row in self._matching(where):
            key = (*(_VALUES[dimension](row) for dimension in by), row.rating.currency)
            grouped.setdefault(key, []).append(row)
        following = [key for key in sorted(grouped) if after is None or key > after]
        page = tuple(UsageGroup(key, _sums(grouped[key])) for key in following[:limit])
        return GroupPage(page, page[-1].key if len(following) > limit else None)

    async def rows(self, where: UsageFilter, *, after: int | None, limit: int) -> RowPage:
        """See `Ledger.rows`."""
        following = [row for row in self._matching(where) if after is None or row.sequence > after]
        page = tuple(following[:limit])
        return RowPage(page, page[-1].sequence if len(following) > limit else None)

    async def reconcile(self, where: UsageFilter) -> Reconciliation:
        """See `Ledger.reconcile`."""
        found = self._matching(where)
        currencies = sorted({row.rating.currency for row in found})
        return Reconciliation(
            totals=tuple(_sums([row for row in found if row.rating.currency == currency]) for currency in currencies),
            outcomes=tuple(sorted(Counter(row.facts.outcome.value for row in found).items())),
            corrections=sum(row.corrects_sequence is not None for row in found),
            quarantined=len(await self.quarantined(limit=len(self._quarantine))),
            sequence=len(self._rows),
            published_sequence=self._published,
        )

    async def erased(self, tenants: Collection[str]) -> frozenset[str]:
        """See `Ledger.erased`: nobody is erased here; pseudonyms are known by their look."""
        self._answer()
        return frozenset(filter(is_pseudonym, tenants))

    async def quarantined(self, *, limit: int, after: Quarantined | None = None) -> Sequence[Quarantined]:
        """See `Ledger.quarantined`."""
        self._answer()
        waiting = [entry for entry in self._quarantine.values() if entry.replayed_ms is None]
        behind = [entry for entry in waiting if after is None or _place(entry) > _place(after)]
        return sorted(behind, key=_place)[:limit]

    async def mark_replayed(self, fingerprint: str, *, now_ms: int) -> None:
        """See `Ledger.mark_replayed`."""
        self._answer()
        if fingerprint in self._quarantine:
            self._quarantine[fingerprint] = replace(self._quarantine[fingerprint], replayed_ms=now_ms)

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("the ledger does not answer")

    def _matching(self, where: UsageFilter) -> list[LedgerRow]:
        self._answer()
        return [row for row in self._rows if row.sequence not in self._successors and _matches(row, where)]


def _place(entry: Quarantined) -> tuple[int, str]:
    return entry.first_seen_ms, entry.fingerprint


def _matches(row: LedgerRow, where: UsageFilter) -> bool:
    return (
        where.tenant_id in (None, row.facts.tenant_id)
        and where.model in (None, row.facts.model)
        and where.key_id in (None, row.facts.key_id)
        and (where.from_ms is None or row.facts.time_ms >= where.from_ms)
        and (where.to_ms is None or row.facts.time_ms < where.to_ms)
    )


def _sums(rows: Sequence[LedgerRow]) -> Totals:
    return Totals(
        attempts=len(rows),
        requests=sum(row.facts.attempt <= 1 for row in rows),
        input_tokens=sum(row.facts.input_tokens for row in rows),
        cached_tokens=sum(row.facts.cached_tokens for row in rows),
        output_tokens=sum(row.facts.output_tokens for row in rows),
        amount=sum((row.rating.amount for row in rows), Decimal(0)),
        currency=rows[0].rating.currency,
    )


def _fingerprint(raw: RawEvent) -> str:
    return sha256(raw.subject.encode() + b"\x00" + raw.data).hexdigest()

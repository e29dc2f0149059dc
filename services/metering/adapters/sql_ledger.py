"""`Ledger` in SQL.

Writes go through one thread and one transaction each, which locks the head first: read what is recorded, decide
(`domain.ledger.plan_batch`), write rows and head together. A unique constraint on what makes an event the same stands
behind the decision (invariant 14). Queries are in `sql_queries`. Decision: docs/decisions/0070-ledger.md.
"""

from collections.abc import Collection, Sequence
from hashlib import sha256

from msgspec.structs import replace
from sqlalchemy import Connection, bindparam, insert, select, tuple_, update

from services.metering.adapters import sql_queries
from services.metering.adapters.bulk_insert import insert_rows
from services.metering.adapters.row_mapping import READ, ledger_row
from services.metering.adapters.schema import ONLY_ROW, billing_outbox, ledger_head, quarantine, usage_rows
from services.metering.adapters.schema_accounts import erased_tenants
from services.metering.adapters.sql_database import SqlDatabase
from services.metering.adapters.sql_forgotten import read_forgotten
from services.metering.adapters.sql_rollup import fold
from services.metering.domain.forgetting import PSEUDONYM_MARK, Forgotten, is_pseudonym, tenant_hash
from services.metering.domain.ledger import (
    BatchPlan,
    Books,
    Candidate,
    LedgerRow,
    RawEvent,
    Rejected,
    Result,
    plan_batch,
)
from services.metering.domain.queries import Dimension, GroupKey, GroupPage, Reconciliation, RowPage, UsageFilter
from services.metering.domain.rating import Rating
from services.metering.ports import Claimed, Publication, Quarantined

lock_head = select(ledger_head).where(ledger_head.c.id == ONLY_ROW).with_for_update()
"""Whoever writes rows, sums or periods does this first."""
_move_head = update(ledger_head).where(ledger_head.c.id == ONLY_ROW)
_same_ids = (
    select(*READ)
    .where(usage_rows.c.event_id.in_(bindparam("event_ids", expanding=True)))
    .order_by(usage_rows.c.sequence)
)
_supersede = (
    update(usage_rows)
    .where(usage_rows.c.sequence == bindparam("replaced"))
    .values(superseded_by=bindparam("replaced_by"))
)
_is_outbox = billing_outbox.c.id == ONLY_ROW


class SqlLedger:
    """See `ports.Ledger`. Make it with `SqlLedger.open`, or over a database that others use too."""

    def __init__(self, database: SqlDatabase) -> None:
        self.database = database
        self._known = Forgotten()

    @classmethod
    async def open(cls, url: str) -> "SqlLedger":
        """Connect and migrate. Raises Unavailable."""
        return cls(await SqlDatabase.open(url))

    async def close(self) -> None:
        """Let running transactions end, then disconnect. Idempotent."""
        await self.database.close()

    async def append(self, items: Sequence[Candidate | Rejected], *, now_ms: int) -> Sequence[Result]:
        """See `Ledger.append`."""
        return await self.database.write("append", lambda connection: self._append(connection, items, now_ms))

    def _append(self, connection: Connection, items: Sequence[Candidate | Rejected], now_ms: int) -> Sequence[Result]:
        head = connection.execute(lock_head).one()
        if head.changes != self._known.changes:
            self._known = read_forgotten(connection, head.changes)
        items = self._known.applied_to(items)
        ids = {item.facts.event_id for item in items if isinstance(item, Candidate)}
        recorded = [ledger_row(row) for row in connection.execute(_same_ids, {"event_ids": list(ids)})] if ids else []
        plan = plan_batch(items, recorded, Books(head.sequence, head.open_from_ms), now_ms=now_ms)
        write_plan(connection, plan, now_ms)
        return plan.results

    async def fold(self, *, least: int) -> int:
        """See `Ledger.fold`."""
        if await self.database.read("count unfolded", _unfolded) < max(least, 1):
            return 0
        return await self.database.write("fold", lambda connection: _fold(connection, least))

    async def claim_unpublished(self, holder: str, *, now_ms: int, lease_ms: int, limit: int) -> Claimed:
        """See `Ledger.claim_unpublished`."""
        if not await self.unpublished():
            return Claimed()  # an idle ledger is not written to
        return await self.database.write(
            "claim", lambda connection: _claim(connection, holder, now_ms, lease_ms, limit)
        )

    async def mark_published(self, holder: str, *, sequence: int, turn: int) -> None:
        """See `Ledger.mark_published`."""
        mine = (billing_outbox.c.holder == holder) & (billing_outbox.c.turn == turn)
        statement = (
            update(billing_outbox)
            .where(_is_outbox, mine, billing_outbox.c.published_sequence < sequence)
            .values(published_sequence=sequence)
        )
        await self.database.write("mark published", lambda connection: connection.execute(statement))

    async def publication(self) -> Publication:
        """See `Ledger.publication`."""
        return await self.database.read("publication", _publication)

    async def publish_again(self, *, after: int, unless_erased: bool = False) -> int:
        """See `Ledger.publish_again`."""
        return await self.database.write("publish again", lambda c: _publish_again(c, after, unless_erased))

    async def unpublished(self) -> int:
        """See `Ledger.unpublished`."""
        return await self.database.read("count unpublished", _unpublished)

    async def groups(
        self, where: UsageFilter, by: Sequence[Dimension], *, after: GroupKey | None, limit: int
    ) -> GroupPage:
        """See `Ledger.groups`."""
        return await self.database.read(
            "groups", lambda connection: sql_queries.groups(connection, where, by, after, limit)
        )

    async def rows(self, where: UsageFilter, *, after: int | None, limit: int) -> RowPage:
        """See `Ledger.rows`."""
        return await self.database.read("rows", lambda connection: sql_queries.rows(connection, where, after, limit))

    async def reconcile(self, where: UsageFilter) -> Reconciliation:
        """See `Ledger.reconcile`."""
        return await self.database.read("reconcile", lambda connection: sql_queries.reconcile(connection, where))

    async def erased(self, tenants: Collection[str]) -> frozenset[str]:
        """See `Ledger.erased`."""
        hashes = {tenant_hash(name): name for name in tenants}
        if not hashes:
            return frozenset()
        asked = select(erased_tenants.c.tenant_hash).where(erased_tenants.c.tenant_hash.in_(hashes))
        found: Sequence[str] = await self.database.read("erased", lambda each: each.execute(asked).scalars().all())
        return frozenset(hashes[each] for each in found) | frozenset(filter(is_pseudonym, tenants))

    async def quarantined(self, *, limit: int, after: Quarantined | None = None) -> Sequence[Quarantined]:
        """See `Ledger.quarantined`."""
        return await self.database.read("quarantined", lambda connection: _quarantined(connection, limit, after))

    async def mark_replayed(self, fingerprint: str, *, now_ms: int) -> None:
        """See `Ledger.mark_replayed`."""
        statement = update(quarantine).where(quarantine.c.fingerprint == fingerprint).values(replayed_ms=now_ms)
        await self.database.write("mark replayed", lambda connection: connection.execute(statement))


def write_plan(connection: Connection, plan: BatchPlan, now_ms: int) -> None:
    """Write what was decided, in the transaction that locked the head."""
    if plan.rows:
        insert_rows(connection, plan.rows)
        connection.execute(_move_head, {"sequence": plan.head})
    if plan.successors:
        pairs = [{"replaced": old, "replaced_by": new} for old, new in plan.successors.items()]
        connection.execute(_supersede, pairs)
    for rejected in plan.quarantined:
        _put_aside(connection, rejected, now_ms)


def _put_aside(connection: Connection, rejected: Rejected, now_ms: int) -> None:
    name = fingerprint(rejected.raw)
    known = connection.execute(select(quarantine.c.fingerprint).where(quarantine.c.fingerprint == name)).first()
    if known is None:
        values = {
            "fingerprint": name,
            "subject": rejected.raw.subject,
            "data": rejected.raw.data,
            "reason": rejected.reason,
            "first_seen_ms": now_ms,
        }
        connection.execute(insert(quarantine), values)


def fingerprint(raw: RawEvent) -> str:
    """Names a message that was put aside: the same message again is the same entry."""
    return sha256(raw.subject.encode() + b"\x00" + raw.data).hexdigest()


def _unfolded(connection: Connection) -> int:
    statement = select(ledger_head.c.sequence - ledger_head.c.folded_sequence)
    return int(connection.execute(statement).scalar_one())


def _fold(connection: Connection, least: int) -> int:
    connection.execute(lock_head)
    return fold(connection, least=least)


def _claim(connection: Connection, holder: str, now_ms: int, lease_ms: int, limit: int) -> Claimed:
    free = (billing_outbox.c.holder == holder) | (billing_outbox.c.lease_until_ms <= now_ms)
    taken = connection.execute(
        update(billing_outbox)
        .where(_is_outbox, free)
        .values(holder=holder, lease_until_ms=now_ms + lease_ms)
        .returning(billing_outbox.c.published_sequence, billing_outbox.c.turn)
    ).one_or_none()
    if taken is None:
        return Claimed()
    after = usage_rows.c.sequence > taken.published_sequence
    following = select(*READ).where(after).order_by(usage_rows.c.sequence).limit(limit)
    return Claimed(with_credits(connection, [ledger_row(row) for row in connection.execute(following)]), taken.turn)


def with_credits(connection: Connection, rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """The rows, each correction with the rating that it takes back."""
    wanted = [row.corrects_sequence for row in rows if row.corrects_sequence is not None]
    if not wanted:
        return list(rows)
    columns = usage_rows.c
    found = connection.execute(
        select(columns.sequence, columns.price_id, columns.currency, columns.amount).where(columns.sequence.in_(wanted))
    )
    credits = {row.sequence: Rating(row.price_id, row.currency, row.amount) for row in found}
    return [
        row if row.corrects_sequence is None else replace(row, credit=credits.get(row.corrects_sequence))
        for row in rows
    ]


def _publication(connection: Connection) -> Publication:
    row = connection.execute(select(billing_outbox).where(_is_outbox)).one()
    return Publication(row.published_sequence, row.turn)


def _publish_again(connection: Connection, after: int, unless_erased: bool) -> int:
    outbox = connection.execute(select(billing_outbox).where(_is_outbox).with_for_update()).one()
    if outbox.published_sequence <= after:
        return 0
    missing = usage_rows.c.sequence.between(after + 1, outbox.published_sequence)
    named = select(usage_rows.c.sequence).where(missing, usage_rows.c.tenant_id.not_like(f"{PSEUDONYM_MARK}%"))
    if unless_erased and connection.execute(named.limit(1)).first() is None:
        return 0
    again = {"published_sequence": after, "turn": outbox.turn + 1}
    connection.execute(update(billing_outbox).where(_is_outbox).values(again))
    return int(outbox.published_sequence - after)


def _unpublished(connection: Connection) -> int:
    statement = select(ledger_head.c.sequence - billing_outbox.c.published_sequence).select_from(
        ledger_head.join(billing_outbox, ledger_head.c.id == billing_outbox.c.id)
    )
    return int(connection.execute(statement).scalar_one())


def _quarantined(connection: Connection, limit: int, after: Quarantined | None) -> list[Quarantined]:
    place = (quarantine.c.first_seen_ms, quarantine.c.fingerprint)
    waiting = select(quarantine).where(quarantine.c.replayed_ms.is_(None)).order_by(*place).limit(limit)
    if after is not None:
        waiting = waiting.where(tuple_(*place) > (after.first_seen_ms, after.fingerprint))
    return [
        Quarantined(row.fingerprint, RawEvent(row.subject, bytes(row.data)), row.reason, row.first_seen_ms, None)
        for row in connection.execute(waiting)
    ]

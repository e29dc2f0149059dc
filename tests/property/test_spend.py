"""What tenants have spent: adding rows as they come gives what the ledger's own sums say, at every sequence."""

import asyncio
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from roundhouse.catalogue.records import Budget, ScopeLimits, Tenant
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import TenantId
from roundhouse.wire.v1.usage_pb2 import BudgetAlert
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_spend import SqlSpend
from services.metering.domain.budgets import Scopes, SpendSums, add_rows, forget_before
from services.metering.operations.budgeting import BudgetFeed
from services.metering.ports import TenantSpend
from tests.builders.usage import abandoned, candidate, priced_catalogue, usage_facts
from tests.fakes.catalogue import FixedCatalogue
from tests.fakes.clock import ManualClock

DAY_MS = 86_400_000
NOW_MS = 1_767_225_600_000 + 15 * DAY_MS  # 2026-01-16T00:00Z: yesterday is another day, three weeks ago another month
PRICED = priced_catalogue()
KEYS = {"key-t1": ("t1", "k:key-t1"), "key-t2": ("t1", "k:key-t1")}  # t2's key is not t1's, whatever the store says
BUDGETED = {
    name: replace(model, tenant_limits=ScopeLimits(budget=Budget(amount="1"))) for name, model in PRICED.models.items()
}
SCOPES = Scopes(KEYS, replace(PRICED, models=BUDGETED))
EVENT = st.tuples(
    st.integers(0, 6),  # which request; a repeat is the same event, or the gateway's after the scheduler's
    st.sampled_from(["t1", "t2"]),
    st.sampled_from([NOW_MS, NOW_MS + 5_000, NOW_MS - 5_000, NOW_MS - 20 * DAY_MS]),
    st.booleans(),  # the scheduler's event
)


def made(number: int, tenant: str, time_ms: int, cut: bool) -> Any:
    """An event that may become a row; of one request always the same."""
    make = abandoned if cut else usage_facts
    return candidate(make(f"{tenant}-r{number}-{time_ms}", **of(tenant), time_ms=time_ms + (1 if cut else 0)))


def of(tenant: str) -> dict[str, str]:
    """A tenant, its key, and the model by its own name."""
    return {"tenant_id": tenant, "key_id": f"key-{tenant}", "adapter": ""}


@given(batches=st.lists(st.lists(EVENT, max_size=4), max_size=5))
@settings(max_examples=25, deadline=None)
def test_sums_are_a_function_of_the_ledger(batches: list[list[tuple[int, str, int, bool]]]) -> None:
    """Invariant 14 for budgets: whatever the order, repeats and corrections, the incremental sums of this month and day
    are those that SQL adds up; a gateway's event takes back the scheduler's in the period where that was."""

    async def scenario(url: str) -> None:
        ledger = await SqlLedger.open(url)
        try:
            spend, known = SqlSpend(ledger.database), 0
            sums: SpendSums = {}
            for batch in batches:
                await ledger.append([made(*event) for event in batch], now_ms=NOW_MS)
                page = await spend.following(known, limit=100)
                add_rows(sums, page.rows, SCOPES)
                forget_before(sums, NOW_MS)
                known = page.head
                sequence, whole = await spend.sums(NOW_MS, SCOPES)
                assert sequence == known
                assert {key: amount for key, amount in sums.items() if amount} == whole
        finally:
            await ledger.close()

    with TemporaryDirectory() as folder:
        asyncio.run(scenario(f"sqlite:///{Path(folder) / 'ledger.sqlite3'}"))


class Store:
    """A `BudgetStore` that takes only what is newer, and may be away or forget."""

    def __init__(self) -> None:
        self.away = False
        self.spends: dict[str, TenantSpend] = {}
        self.counted: list[str] = []
        self.sequence: int | None = None
        self.keys: dict[str, tuple[str, str]] = {}

    async def write(self, spends: Any) -> None:
        """See `BudgetStore.write`."""
        if self.away:
            raise Unavailable("the store is away")
        for spend in spends:
            whose = spend.tenant_id + (f" {spend.scope}" if spend.scope else "")
            before = self.spends.get(whose)
            if before is None or spend.sequence > before.sequence:
                self.counted += [name for at, name in spend.counted if before is None or at > before.sequence]
                self.spends[whose] = spend

    async def key_scopes(self) -> dict[str, tuple[str, str]]:
        """See `BudgetStore.key_scopes`."""
        return dict(self.keys)

    async def known(self) -> int | None:
        """See `BudgetStore.known`."""
        return self.sequence

    async def remember(self, sequence: int) -> None:
        """See `BudgetStore.remember`."""
        self.sequence = sequence


class Told:
    """`BudgetAlerts` that remembers, and may be away."""

    def __init__(self) -> None:
        self.away = False
        self.percents: list[int] = []

    async def tell(self, alert: BudgetAlert) -> bool:
        """See `BudgetAlerts.tell`."""
        if self.away:
            raise Unavailable("the bus is away")
        self.percents.append(alert.percent)
        return True


def test_a_feed_goes_on_after_every_kind_of_fault(tmp_path: Path) -> None:
    """A store that is away, one that forgot, a process that was down while rows came, a bus without alerts: each time
    the spend is exact afterwards, reservations are given back once, and no alert is lost. 0.00492 an event."""

    async def turn(feed: BudgetFeed, *, fails: bool = False) -> None:
        try:
            await feed.turn()
        except Unavailable:
            assert fails
        else:
            assert not fails

    async def scenario() -> None:
        ledger = await SqlLedger.open(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        store, told, clock = Store(), Told(), ManualClock()
        tenant = Tenant(name=TenantId("t1"), budget=Budget(amount="0.0123"))
        prices = FixedCatalogue(replace(priced_catalogue(), tenants={tenant.name: tenant}))

        def new_feed() -> BudgetFeed:
            return BudgetFeed(SqlSpend(ledger.database), store, told, prices, clock)

        async def bill(name: str) -> None:
            await ledger.append([candidate(usage_facts(name, time_ms=clock.now_ms()))], now_ms=clock.now_ms())

        def spent() -> Decimal:
            return max(store.spends["t1"].sums.values())

        feed = new_feed()
        await turn(feed)
        await bill("r1")
        store.away = True
        await turn(feed, fails=True)
        store.away = False
        await turn(feed)
        assert (spent(), store.counted) == (Decimal("0.00492"), ["r1"])
        await bill("r2")
        told.away = True
        await turn(feed, fails=True)
        assert spent() == Decimal("0.00984")
        told.away = False
        await turn(feed)
        assert told.percents == [50, 80]
        await bill("r3")
        feed = new_feed()  # the process was down while the third was recorded
        await turn(feed)
        assert (spent(), store.counted, told.percents[2:]) == (Decimal("0.01476"), ["r1", "r2", "r3"], [50, 80, 100])
        store.spends, store.sequence = {}, None
        await turn(feed)
        assert (spent(), store.counted) == (Decimal("0.01476"), ["r1", "r2", "r3"])
        await ledger.close()

    asyncio.run(scenario())


def test_a_key_and_its_successor_have_one_sum_and_a_model_one_for_each_tenant(tmp_path: Path) -> None:
    """0.00492 an event: two by a key, one by its successor, which is made while the feed runs, and one by a key without
    a budget, all of t1; t2 calls the same model. Each reservation is given back in every scope that it was made in."""

    async def scenario() -> None:
        ledger = await SqlLedger.open(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        store, clock = Store(), ManualClock()
        prices = FixedCatalogue(SCOPES.catalogue)
        feed = BudgetFeed(SqlSpend(ledger.database), store, Told(), prices, clock)

        async def bill(name: str, tenant: str, key_id: str) -> None:
            facts = usage_facts(name, tenant_id=tenant, key_id=key_id, adapter="", time_ms=clock.now_ms())
            await ledger.append([candidate(facts)], now_ms=clock.now_ms())

        def spent(whose: str) -> Decimal:
            return max(store.spends[whose].sums.values())

        await feed.turn()
        store.keys = {"key-1": ("t1", "k:key-1")}
        await bill("r1", "t1", "key-1")
        await feed.turn()
        await bill("r2", "t1", "key-1")
        store.keys["key-2"] = ("t1", "k:key-1")
        await bill("r3", "t1", "key-2")
        await bill("r4", "t1", "key-other")
        await bill("r5", "t2", "key-1")
        await feed.turn()
        assert spent("t1 k:key-1") == Decimal("0.01476")
        assert spent("t1 m:m1") == Decimal("0.01968")
        assert spent("t2 m:m1") == Decimal("0.00492")
        assert "t2 k:key-1" not in store.spends
        assert sorted(store.counted) == sorted(["r1", "r1", "r2", "r2", "r3", "r3", "r4", "r5"])
        store.spends, store.sequence = {}, None
        await feed.turn()
        assert (spent("t1 k:key-1"), spent("t1 m:m1")) == (Decimal("0.01476"), Decimal("0.01968"))
        await ledger.close()

    asyncio.run(scenario())

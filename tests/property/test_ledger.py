"""Invariant 14: whatever the order, the repeats and the lateness, the ledger's totals are the same."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.domain.periods import HOUR_MS
from services.metering.domain.queries import Dimension, GroupPage, UsageFilter
from services.metering.domain.usage import UsageFacts
from services.metering.ports import Ledger
from tests.builders.usage import TIME_MS, abandoned, candidate, usage_facts
from tests.fakes.ledger import FakeLedger

BY = (Dimension.TENANT, Dimension.MODEL, Dimension.HOUR)


@st.composite
def attempts(draw: st.DrawFn) -> list[UsageFacts]:
    """What one attempt puts on the bus: the gateway's event, the scheduler's, or both."""
    number = draw(st.integers(0, 30))
    tenant = draw(st.sampled_from(["t1", "t2"]))
    spent, known = number * 17 % 90, number * 7 % 40  # the same for the same id: an emitter never contradicts itself
    streamed = usage_facts(f"r{number}", tenant_id=tenant, time_ms=TIME_MS + number * HOUR_MS, output_tokens=spent)
    silent = abandoned(f"r{number}", tenant_id=tenant, time_ms=TIME_MS - number * HOUR_MS, output_tokens=known)
    return draw(st.sampled_from([[streamed], [silent], [streamed, silent], [silent, streamed]]))


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[UsageFacts], list[list[UsageFacts]]]:
    """Events, and batches in which each of them arrives at least once, in any order, some of them again."""
    events = [event for attempt in draw(st.lists(attempts(), min_size=1, max_size=12)) for event in attempt]
    again = draw(st.lists(st.sampled_from(events), max_size=12))
    shuffled = draw(st.permutations(events + again))
    size = draw(st.integers(1, 8))
    batches = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
    replayed = draw(st.booleans())  # the whole stream once more, from the beginning
    return events, batches + batches if replayed else batches


def expected(events: Sequence[UsageFacts]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """(tenant, model, hour) → (attempts, output tokens), by the rule itself: the gateway's event if there is one."""
    chosen: dict[tuple[str, str], UsageFacts] = {}
    for event in sorted(events, key=lambda event: event.emitter == "gateway"):
        chosen[event.tenant_id, event.event_id] = event
    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for event in chosen.values():
        key = (event.tenant_id, event.model, event.time_ms - event.time_ms % HOUR_MS)
        count, tokens = sums.get(key, (0, 0))
        sums[key] = (count + 1, tokens + event.output_tokens)
    return sums


async def totals_after(ledger: Ledger, batches: Sequence[Sequence[UsageFacts]]) -> GroupPage:
    """The groups after all batches."""
    for number, batch in enumerate(batches):
        await ledger.append([candidate(event) for event in batch], now_ms=TIME_MS + number)
    return await ledger.groups(UsageFilter(), BY, after=None, limit=1000)


def check(page: GroupPage, events: Sequence[UsageFacts]) -> None:
    """The groups are what the rule says."""
    found = {group.key[:3]: (group.totals.attempts, group.totals.output_tokens) for group in page.groups}
    assert found == expected(events)


@given(arrivals())
def test_totals_do_not_depend_on_arrival(case: tuple[list[UsageFacts], list[list[UsageFacts]]]) -> None:
    """Invariant 14 on the decision alone, in memory."""
    events, batches = case
    check(asyncio.run(totals_after(FakeLedger(), batches)), events)


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy for each example."""
    path = tmp_path_factory.mktemp("ledger") / "empty.sqlite3"

    async def make() -> None:
        await (await SqlLedger.open(f"sqlite:///{path}")).close()

    asyncio.run(make())
    return path


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=arrivals())
def test_totals_in_sqlite_do_not_depend_on_arrival(
    empty_ledger: Path, case: tuple[list[UsageFacts], list[list[UsageFacts]]]
) -> None:
    """Invariant 14 through the database: sequences without gaps, and the totals of the rule."""
    events, batches = case

    async def run(path: Path) -> tuple[GroupPage, int, list[int]]:
        ledger = await SqlLedger.open(f"sqlite:///{path}")
        try:
            page = await totals_after(ledger, batches)
            rows = (await ledger.claim_unpublished("test", now_ms=0, lease_ms=1, limit=1000)).rows
            last = (await ledger.reconcile(UsageFilter())).sequence
            return page, last, [row.sequence for row in rows]
        finally:
            await ledger.close()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite3"
        shutil.copy(empty_ledger, path)
        page, last, sequences = asyncio.run(run(path))
    check(page, events)
    assert sequences == list(range(1, last + 1))

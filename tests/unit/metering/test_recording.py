"""When events are acknowledged, and what happens while a part is away. On fakes; no time passes."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from roundhouse.catalogue.records import EMPTY
from roundhouse.errors import InvalidInput, Unavailable
from services.metering.domain.ledger import Candidate, LedgerRow, Rejected, Result
from services.metering.domain.queries import UsageFilter
from services.metering.domain.usage import UsageFacts
from services.metering.operations.pricing import PriceKeeper
from services.metering.operations.publishing import Publisher
from services.metering.operations.recording import Recorder
from services.metering.operations.replaying import replay_quarantine
from services.metering.ports import Delivery
from tests.builders.usage import candidate, priced_catalogue, usage_facts
from tests.fakes.clock import ManualClock
from tests.fakes.ledger import FakeLedger
from tests.fakes.prices import FakePrices, SetCatalogue, pricing

EVERYTHING = UsageFilter()


class ScriptedStream:
    """Gives its batches in order, a `None` is a bus that is away; sets `stopping` after the last."""

    def __init__(self, batches: Sequence[Sequence[Delivery] | None], stopping: asyncio.Event) -> None:
        self._batches = list(batches)
        self._stopping = stopping
        self.acknowledged: list[Delivery] = []

    async def pull(self, *, limit: int) -> Sequence[Delivery]:
        batch = self._batches.pop(0)
        if not self._batches:
            self._stopping.set()
        if batch is None:
            raise Unavailable("the bus is away")
        return batch

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self.acknowledged += deliveries

    async def pending(self) -> int:
        return 0


class RecordingObserver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.conditions: list[tuple[str, str | None]] = []
        self.on_reason: Callable[[], None] = lambda: None

    def recorded(self, results: Sequence[Result], *, commit_ms: int) -> None:
        self.results += results

    def pending(self, events: int) -> None:
        return

    def unpublished(self, rows: int) -> None:
        return

    def condition(self, name: str, *, reason: str | None) -> None:
        self.conditions.append((name, reason))
        if reason is not None:
            self.on_reason()


def delivery(request_id: str) -> Delivery:
    """One good event."""
    made = candidate(usage_facts(request_id))
    return Delivery(made.facts, made.raw, request_id)


async def run(
    batches: Sequence[Sequence[Delivery] | None], ledger: FakeLedger, observer: RecordingObserver, prices: PriceKeeper
) -> ScriptedStream:
    """Run a recorder over the batches until the last is handled."""
    stopping = asyncio.Event()
    stream = ScriptedStream(batches, stopping)
    await Recorder(stream, ledger, prices, ManualClock(), observer).run(stopping)
    return stream


async def test_nothing_is_acknowledged_before_it_is_in_the_ledger() -> None:
    """The ledger is away at first: the same batch is tried again, then acknowledged once."""
    ledger, observer = FakeLedger(), RecordingObserver()
    ledger.away = True
    stopping = asyncio.Event()
    batch = [delivery("r1"), delivery("r2")]
    stream = ScriptedStream([batch, ()], stopping)

    def back() -> None:
        assert stream.acknowledged == []
        ledger.away = False

    observer.on_reason = back
    await Recorder(stream, ledger, pricing(priced_catalogue()), ManualClock(), observer).run(stopping)
    assert stream.acknowledged == batch
    assert observer.results == [Result.RECORDED, Result.RECORDED]
    recording = [reason for name, reason in observer.conditions if name == "recording"]
    assert recording == [None, "the ledger does not answer", None]


async def test_a_stop_while_the_ledger_is_away_leaves_the_batch_to_the_stream() -> None:
    """It is not acknowledged, so it comes again."""
    ledger = FakeLedger()
    ledger.away = True
    stream = await run([[delivery("r1")]], ledger, RecordingObserver(), pricing(priced_catalogue()))
    assert stream.acknowledged == []


async def test_a_bus_that_is_away_is_reported_and_asked_again() -> None:
    """Unready while it is away, ready after."""
    observer = RecordingObserver()
    stream = await run([None, [delivery("r1")]], FakeLedger(), observer, pricing(priced_catalogue()))
    assert len(stream.acknowledged) == 1
    told = [reason for name, reason in observer.conditions if name == "usage_stream"]
    assert told == ["the bus is away", None]


async def test_nothing_is_rated_before_the_first_catalogue() -> None:
    """Generation 0 has no prices; booking 0 would be a lost bill."""
    observer, catalogue = RecordingObserver(), SetCatalogue(EMPTY)

    def arrives() -> None:
        catalogue.current = priced_catalogue()

    observer.on_reason = arrives
    ledger = FakeLedger()
    keeper = PriceKeeper(catalogue, FakePrices(), ManualClock())
    await run([[delivery("r1")], ()], ledger, observer, keeper)
    (row,) = (await ledger.rows(EVERYTHING, after=None, limit=9)).rows
    assert row.rating.price_id == "p1"


class PickyLedger(FakeLedger):
    """Refuses a batch that holds one request, as a database does that cannot store one of its values."""

    async def append(self, items: Sequence[Candidate | Rejected], *, now_ms: int) -> Sequence[Result]:
        """See `Ledger.append`."""
        if any(isinstance(item, Candidate) and item.facts.request_id == "bad" for item in items):
            raise InvalidInput("the ledger refuses a value")
        return await super().append(items, now_ms=now_ms)


async def test_one_refused_value_does_not_hold_up_the_rest() -> None:
    """The batch is halved until the event is found; it is put aside, all others count."""
    ledger, observer = PickyLedger(), RecordingObserver()
    batch = [delivery(name) for name in ("r1", "r2", "bad", "r3", "r4")]
    stream = await run([batch], ledger, observer, pricing(priced_catalogue()))
    assert stream.acknowledged == batch
    assert observer.results == [*[Result.RECORDED] * 2, Result.QUARANTINED, *[Result.RECORDED] * 2]
    (entry,) = await ledger.quarantined(limit=9)
    assert entry.reason == "the ledger refuses a value"


class FlakyBilling:
    """Takes some rows of each window, then fails."""

    def __init__(self, taken_a_call: Sequence[int]) -> None:
        self._taken = list(taken_a_call)
        self.sequences: list[int] = []

    async def last_sequence(self) -> int | None:
        return self.sequences[-1] if self.sequences else 0

    async def publish(self, rows: Sequence[LedgerRow], *, turn: int = 0) -> int:
        taken = self._taken.pop(0)
        if not taken:
            raise Unavailable("the billing stream takes no record now")
        self.sequences += [row.sequence for row in rows[:taken]]
        return rows[:taken][-1].sequence


async def test_publishing_goes_on_where_it_stopped() -> None:
    """Two of five are taken, then a failure, then the rest: 1 to 5 in order, none skipped."""
    ledger = FakeLedger()
    await ledger.append([candidate(usage_facts(f"r{n}")) for n in range(5)], now_ms=1)
    billing = FlakyBilling([2, 0, 3])
    publisher = Publisher(ledger, billing, ManualClock(), holder="a")
    assert await publisher.turn() == 2
    with pytest.raises(Unavailable):
        await publisher.turn()
    assert await publisher.turn() == 3
    assert await publisher.turn() == 0
    assert billing.sequences == [1, 2, 3, 4, 5]


async def test_a_stream_that_lost_records_gets_them_again() -> None:
    """Five rows published, then the stream is empty: all five again, once; an intact stream is left alone."""
    ledger, billing = FakeLedger(), FlakyBilling([5, 5])
    await ledger.append([candidate(usage_facts(f"r{n}")) for n in range(5)], now_ms=1)
    publisher = Publisher(ledger, billing, ManualClock(), holder="a")
    while await ledger.unpublished():
        await publisher.turn()
    assert await publisher.catch_up() == 0
    billing.sequences.clear()
    assert await publisher.catch_up() == 5
    assert await publisher.catch_up() == 0
    while await ledger.unpublished():
        await publisher.turn()
    assert billing.sequences == [1, 2, 3, 4, 5]


async def test_publishing_again_is_not_undone_by_the_window_that_was_under_way() -> None:
    """Rows 1 and 2 are published; while row 3 is, an operator has everything published again: it all is, from 1 on."""
    ledger, billing = FakeLedger(), FlakyBilling([2, 1, 3])
    publisher = Publisher(ledger, billing, ManualClock(), holder="a")
    await ledger.append([candidate(usage_facts(f"r{n}")) for n in range(2)], now_ms=1)
    await publisher.turn()
    await ledger.append([candidate(usage_facts("r2"))], now_ms=2)
    publish = billing.publish

    async def meanwhile(rows: Sequence[LedgerRow], *, turn: int = 0) -> int:
        last = await publish(rows, turn=turn)
        if turn == 0:
            assert await ledger.publish_again(after=0) == 2
        return last

    billing.publish = meanwhile  # type: ignore[method-assign]
    while await ledger.unpublished():
        await publisher.turn()
    assert billing.sequences == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("noticed", ["by a row that could not be published", "by the reconnection"])
async def test_a_stream_that_came_back_empty_gets_old_rows_before_new_ones(noticed: str) -> None:
    """Five rows are published, the bus goes away and comes back with an empty stream, and two more rows are recorded
    before anybody has looked: 1 to 7 in order. With row 6 first, its last record would say that nothing is missing."""
    ledger, billing = FakeLedger(), FlakyBilling([5, 0, 7] if noticed.startswith("by a row") else [5, 7])
    await ledger.append([candidate(usage_facts(f"r{n}")) for n in range(5)], now_ms=1)
    publisher = Publisher(ledger, billing, ManualClock(), holder="a")
    await publisher.turn()
    if noticed.startswith("by a row"):
        await ledger.append([candidate(usage_facts("r5"))], now_ms=2)
        with pytest.raises(Unavailable):
            await publisher.turn()
        await ledger.append([candidate(usage_facts("r6"))], now_ms=3)
    else:
        await publisher.doubt()
        await ledger.append([candidate(usage_facts(f"r{n}")) for n in (5, 6)], now_ms=2)
    billing.sequences.clear()
    while await ledger.unpublished():
        await publisher.turn()
    assert billing.sequences == [1, 2, 3, 4, 5, 6, 7]


async def test_replaying_records_what_is_good_now_and_keeps_the_rest() -> None:
    """Behind one that still is not readable there is one that is; a page holds one."""
    ledger = FakeLedger()
    good, bad = candidate(usage_facts("r1")).raw, candidate(usage_facts("r2")).raw
    await ledger.append([Rejected(bad, "unreadable")], now_ms=1)
    await ledger.append([Rejected(good, "a price was missing")], now_ms=2)

    def decode(_subject: str, data: bytes) -> UsageFacts | str:
        return usage_facts("r1") if data == good.data else "still unreadable"

    counts = await replay_quarantine(ledger, decode, await pricing(priced_catalogue()).book(), ManualClock(), page=1)
    assert counts == {Result.RECORDED: 1, Result.QUARANTINED: 1}
    assert [entry.raw for entry in await ledger.quarantined(limit=9)] == [bad]

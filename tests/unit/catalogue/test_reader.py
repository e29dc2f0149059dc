"""A reader follows the store, tells its listeners, and outlives a store that is away or lost everything."""

import asyncio
from typing import Any, cast

import pytest

from roundhouse import subjects
from roundhouse.catalogue.records import Catalogue, Tenant
from roundhouse.catalogue.store import CatalogueReader
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import TenantId
from tests.fakes.catalogue import InMemoryCatalogueStore
from tests.fakes.event_bus import FakeBus


def generation(number: int, *names: str) -> Catalogue:
    """A catalogue with these tenants."""
    return Catalogue(generation=number, tenants={TenantId(name): Tenant(name=TenantId(name)) for name in names})


class NoPeriods:
    """A lifecycle in which periodic work runs only when a test runs it."""

    def every(self, *_: Any) -> None:
        """Remember nothing."""


async def delivered() -> None:
    """Let the handlers of the fake bus run; they wait for nothing."""
    for _ in range(10):
        await asyncio.sleep(0)


async def started(store: InMemoryCatalogueStore) -> tuple[CatalogueReader, FakeBus]:
    """A reader over a store."""
    bus = FakeBus()
    reader = CatalogueReader(cast("Any", None), bus, store=store)
    await reader.start(cast("Any", NoPeriods()))
    return reader, bus


async def test_it_reads_at_start_and_tells_listeners_at_once() -> None:
    """Who subscribes late gets what is current."""
    store = InMemoryCatalogueStore()
    await store.put(generation(1, "a"), expected_generation=0)
    reader, _ = await started(store)
    seen: list[int] = []
    reader.subscribe(lambda catalogue: seen.append(catalogue.generation))
    assert seen == [1]
    assert (reader.current.generation, reader.not_ready_reason) == (1, None)


async def test_an_empty_store_is_ready_and_empty() -> None:
    """A new cluster must be ready, or nobody could apply its first catalogue."""
    reader, _ = await started(InMemoryCatalogueStore())
    seen: list[int] = []
    reader.subscribe(lambda catalogue: seen.append(catalogue.generation))
    assert (reader.current.generation, reader.not_ready_reason, seen) == (0, None, [])


async def test_it_follows_by_poll_alone() -> None:
    """Without a word on the bus the next poll finds the new generation, once."""
    store = InMemoryCatalogueStore()
    reader, _ = await started(store)
    seen: list[int] = []
    reader.subscribe(lambda catalogue: seen.append(catalogue.generation))
    await store.put(generation(1, "a"), expected_generation=0)
    await reader.refresh()
    await reader.refresh()
    assert seen == [1]


async def test_it_follows_the_announcement() -> None:
    """The bus makes it quick."""
    store = InMemoryCatalogueStore()
    reader, bus = await started(store)
    await store.put(generation(1, "a"), expected_generation=0)
    await bus.publish(subjects.CATALOGUE_CHANGED, b"")
    await delivered()
    assert reader.current.generation == 1


async def test_it_keeps_serving_while_the_store_is_away() -> None:
    """Invariant 18: a lost store takes nothing from who has the catalogue already."""
    store = InMemoryCatalogueStore()
    await store.put(generation(1, "a"), expected_generation=0)
    reader, bus = await started(store)
    store.away = True
    with pytest.raises(Unavailable):
        await reader.refresh()
    await bus.publish(subjects.CATALOGUE_CHANGED, b"")
    await delivered()
    assert (reader.current.generation, reader.not_ready_reason) == (1, None)


async def test_it_is_not_ready_before_the_first_read() -> None:
    """A process that has never seen the store must not get work, and starts all the same."""
    store = InMemoryCatalogueStore()
    store.away = True
    reader, _ = await started(store)
    assert reader.not_ready_reason == "the catalogue was not read yet"
    store.away = False
    await reader.refresh()
    assert reader.not_ready_reason is None


async def test_it_puts_a_lost_catalogue_back() -> None:
    """A store that comes back empty gets the generation that everybody still serves."""
    store = InMemoryCatalogueStore()
    await store.put(generation(4, "a"), expected_generation=0)
    reader, _ = await started(store)
    store.lose_everything()
    await reader.refresh()
    stored = await store.get()
    assert stored is not None
    assert stored.catalogue == generation(4, "a")
    seen: list[int] = []
    reader.subscribe(lambda catalogue: seen.append(catalogue.generation))
    await reader.refresh()  # the same content under another token: read again, and harmless
    assert reader.current.generation == 4


async def test_it_takes_an_older_generation_after_a_failover() -> None:
    """The store decides, so that all readers agree: a replica may have missed the last write."""
    store = InMemoryCatalogueStore()
    await store.put(generation(5, "new"), expected_generation=0)
    reader, _ = await started(store)
    store.lose_everything()
    await store.put(generation(4, "old"), expected_generation=0)
    await reader.refresh()
    assert list(reader.current.tenants) == ["old"]


async def test_two_contents_of_one_number_are_told_apart() -> None:
    """After a failover another content may get the number that readers hold already."""
    store = InMemoryCatalogueStore()
    await store.put(generation(5, "old"), expected_generation=0)
    reader, _ = await started(store)
    store.lose_everything()
    await store.put(generation(5, "new"), expected_generation=0)
    await reader.refresh()
    assert list(reader.current.tenants) == ["new"]


async def test_a_failing_listener_does_not_stop_the_others() -> None:
    """One room's fault must not keep the process on an old catalogue."""
    store = InMemoryCatalogueStore()
    reader, _ = await started(store)
    seen: list[int] = []

    def fail(_: Catalogue) -> None:
        raise RuntimeError("no")

    reader.subscribe(fail)
    reader.subscribe(lambda catalogue: seen.append(catalogue.generation))
    await store.put(generation(1), expected_generation=0)
    await reader.refresh()
    assert seen == [1]

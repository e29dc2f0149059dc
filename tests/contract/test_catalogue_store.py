"""What every `GenerationStore` does."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model, Price, Tenant
from roundhouse.catalogue.store import CATALOGUE_KEY, CatalogueStore, GenerationStore
from roundhouse.errors import Conflict, Unavailable
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import Digest, ModelName, TenantId
from tests.fakes.catalogue import InMemoryCatalogueStore

ACME = Tenant(name=TenantId("acme"), weight=2.5)
CHAT = Model(
    name=ModelName("chat"),
    source_path="/models/chat",
    engine=Engine.REFERENCE,
    interface=Interface.LLM,
    digest=Digest("sha256:00"),
    price=Price(id="p", input="0.15"),
)
FIRST = Catalogue(generation=1, tenants={ACME.name: ACME}, models={CHAT.name: CHAT})
SECOND = Catalogue(generation=2, tenants={ACME.name: ACME})


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[GenerationStore]:
    """An empty store."""
    if request.param == "memory":
        yield InMemoryCatalogueStore()
        return
    redis = open_redis(request.getfixturevalue("redis_url"))
    yield CatalogueStore(redis)
    await redis.aclose()


async def test_nothing_is_there_at_first(store: GenerationStore) -> None:
    """An empty store says so, and does not make up an empty catalogue."""
    assert await store.get() is None
    assert await store.token() is None


async def test_what_was_put_is_what_is_got(store: GenerationStore) -> None:
    """Every field survives the way through the store."""
    await store.put(FIRST, expected_generation=0)
    stored = await store.get()
    assert stored is not None
    assert stored.catalogue == FIRST
    assert stored.token == await store.token()


async def test_a_generation_replaces_the_one_it_was_made_from(store: GenerationStore) -> None:
    """The token changes with it."""
    await store.put(FIRST, expected_generation=0)
    before = await store.token()
    await store.put(SECOND, expected_generation=1)
    stored = await store.get()
    assert stored is not None
    assert stored.catalogue == SECOND
    assert stored.token != before


@pytest.mark.parametrize("expected", [0, 2, 7])
async def test_a_generation_made_from_another_is_refused(store: GenerationStore, expected: int) -> None:
    """B44: the loser of two operators changes nothing."""
    await store.put(FIRST, expected_generation=0)
    with pytest.raises(Conflict):
        await store.put(SECOND, expected_generation=expected)
    stored = await store.get()
    assert stored is not None
    assert stored.catalogue == FIRST


async def test_one_of_many_simultaneous_writers_wins(store: GenerationStore) -> None:
    """Ten writers of the first generation: one is told that it is done, nine that they are late."""
    puts = [store.put(FIRST, expected_generation=0) for _ in range(10)]
    answers = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(answer, Conflict) for answer in answers].count(True) == 9


async def test_what_another_version_wrote_is_unavailable_not_empty(redis_url: str) -> None:
    """A catalogue that this program cannot read must not look like no catalogue."""
    redis = open_redis(redis_url)
    fields = {"generation": "1", "token": "x", "data": '{"models": 5}'}
    await cast("Any", redis.hset(CATALOGUE_KEY, mapping=fields))
    with pytest.raises(Unavailable):
        await CatalogueStore(redis).get()
    await redis.aclose()

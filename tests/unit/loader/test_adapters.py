"""Adapters on a node over fakes in virtual time: who may use them, what is checked, who leaves for whom."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from roundhouse.catalogue.records import Adapter
from roundhouse.errors import CapacityExhausted, InvalidInput, NotFound
from roundhouse.vocabulary import AdapterName, Digest, ModelName, TenantId
from services.loader.domain.versions import triton_model_name
from services.loader.operations.adapters import KEEP_MS, AdapterOrder, AdapterPlace
from services.loader.operations.describe import _adapters
from tests.builders.small_node import SmallNode, on_a_small_node, outcome, small_file, small_model, version_of
from tests.fakes.weight_cache import FakeSource, digest_of

BASE, OTHER = small_model("base"), small_model("other")
ACME, GLOBEX = TenantId("acme"), TenantId("globex")


def declare(node: SmallNode, count: int, *, size: int = 10, tenant: TenantId | None = None) -> list[Adapter]:
    """So many adapters over BASE of `size` bytes, in the catalogue and at their sources."""
    made = []
    for number in range(count):
        file = small_file(f"lora{number}", size)
        adapter = Adapter(
            name=AdapterName(f"a{number}"),
            base=ModelName("base"),
            source_path=f"/adapters/{number}",
            digest=digest_of((file,)),
            files=(file,),
            tenant=tenant,
        )
        node.cache.sources[adapter.source_path] = FakeSource(adapter.digest, adapter.files)
        made.append(adapter)
    node.library.declared = {adapter.name: adapter for adapter in made}
    return made


def order_of(adapter: Adapter, tenant: TenantId = ACME, *, deadline_ms: int = 60_000) -> AdapterOrder:
    """What a gateway asks for."""
    return AdapterOrder(adapter.name, adapter.digest, tenant, triton_model_name(version_of(BASE)), deadline_ms)


async def ensure(node: SmallNode, adapter: Adapter, tenant: TenantId = ACME) -> AdapterPlace:
    """Have it on the node."""
    return await node.adapters.ensure(order_of(adapter, tenant))


@on_a_small_node(BASE, adapter_bytes=1_000)
async def test_staged_checked_and_shelved_once(node: SmallNode) -> None:
    """Eight at once and one later: one copy from the source, one check against the base, one copy in host memory."""
    await node.load(BASE)
    (adapter,) = declare(node, 1)
    places = await asyncio.gather(*(ensure(node, adapter) for _ in range(8)))
    places.append(await ensure(node, adapter))
    assert {(place.path, place.in_host) for place in places} == {(node.shelf.path(adapter.digest), True)}
    assert node.cache.copies.count(adapter.digest) == 1
    assert node.library.looked_at == [(adapter.digest, BASE.digest)]
    assert node.shelf.puts == [adapter.digest]
    assert (node.node.adapters.host.resident, node.node.disk.held_by(adapter.digest).resident) == (10, 10)


@on_a_small_node(BASE, OTHER)
async def test_who_may_not_use_it_finds_nothing(node: SmallNode) -> None:
    """Another tenant, another content, an instance that has gone, another base: nothing is staged for any of them."""
    await node.load(BASE)
    await node.load(OTHER)
    (adapter,) = declare(node, 1, tenant=ACME)
    changed = AdapterOrder(adapter.name, Digest("sha256:0"), ACME, triton_model_name(version_of(BASE)))
    gone = AdapterOrder(adapter.name, adapter.digest, ACME, "base--000000000000")
    elsewhere = AdapterOrder(adapter.name, adapter.digest, ACME, triton_model_name(version_of(OTHER)))
    for order, kind in (
        (order_of(adapter, GLOBEX), NotFound),
        (changed, NotFound),
        (gone, NotFound),
        (elsewhere, InvalidInput),
    ):
        assert isinstance(await outcome(node.adapters.ensure(order)), kind)
    assert adapter.digest not in node.cache.copies


@on_a_small_node(BASE)
async def test_what_does_not_fit_never_reaches_an_engine(node: SmallNode) -> None:
    """The cause is told to each caller, to operators in the node's state and once in the audit stream."""
    await node.load(BASE)
    (adapter,) = declare(node, 1)
    node.library.misfits[adapter.digest] = "made for another base: layer 9"
    for _ in range(3):
        error = await outcome(ensure(node, adapter))
        assert isinstance(error, InvalidInput)
        assert (error.message, error.code) == ("made for another base: layer 9", "adapter_invalid")
    assert node.library.looked_at == [(adapter.digest, BASE.digest)]
    assert node.shelf.puts == []
    (told,) = _adapters(node.node).refused
    assert (told.adapter, told.base, told.reason) == ("a0", "base", "made for another base: layer 9")
    assert [note.what for note in node.audit.notes].count("adapter-refused") == 1


@on_a_small_node(BASE, adapter_bytes=25)
async def test_the_least_recently_used_leaves_host_memory(node: SmallNode) -> None:
    """Two of 10 fit into 25. While both were just named a third one is used from disk; later the oldest makes room.

    Who left for whom is told, and counted: the second, a millisecond and `KEEP_MS` after its use."""
    await node.load(BASE)
    one, two, three = declare(node, 3)
    for adapter in (one, two):
        await ensure(node, adapter)
        await node.clock.sleep_ms(1)
    assert not (await ensure(node, three)).in_host
    await node.clock.sleep_ms(KEEP_MS)
    await node.adapters.turn()
    await ensure(node, one)
    assert (await ensure(node, three)).in_host
    assert set(node.shelf.held) == {one.digest, three.digest}
    [told] = [note for note in node.audit.notes if note.what == "evict"]
    assert told.details == {
        "tier": "adapters",
        "adapter": two.name,
        "digest": two.digest,
        "made_room_for": three.digest,
        "bytes": "10",
        "bytes_freed": "10",
        "idle_ms": str(KEEP_MS + 1),
    }
    assert node.measurements.evictions == ["adapters"]


@on_a_small_node(BASE, disk_bytes=120, adapter_bytes=0)
async def test_who_finds_no_room_waits_until_another_may_leave(node: SmallNode) -> None:
    """100 of 120 are the base's; two of 10 fill it. The third comes when the first may go, after `KEEP_MS`."""
    await node.load(BASE)
    one, two, three = declare(node, 3)
    began_ms = node.clock.monotonic_ms()
    for adapter in (one, two, three):
        await ensure(node, adapter)
    assert node.clock.monotonic_ms() - began_ms >= KEEP_MS
    assert one.digest not in node.cache.cached
    await ensure(node, two)
    hasty = order_of(one, deadline_ms=1_000)
    assert isinstance(await outcome(node.adapters.ensure(hasty)), CapacityExhausted)


@on_a_small_node(BASE, disk_bytes=10_100, adapter_bytes=500)
async def test_thousands_over_one_base(node: SmallNode) -> None:
    """3,000 of 10 bytes each; the disk has room for 1,000 beside the base, host memory for 50. Everyone is served, and
    at the end the node holds as many as fit: no more, no fewer."""
    await node.load(BASE)
    for adapter in declare(node, 3_000):
        await ensure(node, adapter)
        await node.clock.sleep_ms(20)
    assert node.node.disk.resident == 10_100
    assert len(node.node.on_disk) == 1_001
    assert node.node.adapters.host.resident <= 500
    assert len(node.shelf.held) == len(node.node.adapters.shelved) == node.node.adapters.host.resident // 10


@on_a_small_node(BASE, disk_bytes=1_100, adapter_bytes=300)
async def test_adapters_of_what_stands_here_come_ahead(node: SmallNode) -> None:
    """1,000 free beside the base; 110 stay free for models, so 89 of 200 come (890 + 110 = 1,000); 30 are in host
    memory. Nobody leaves for them, and the first request for one waits for nothing."""
    adapters = declare(node, 200)
    await node.adapters.turn()
    await node.clock.sleep_ms(1_000)
    assert not set(node.cache.copies) & {adapter.digest for adapter in adapters}, "its base is not here"
    await node.load(BASE)
    await node.adapters.turn()
    await node.clock.sleep_ms(200_000)
    assert (node.node.disk.free, len(node.shelf.held)) == (110, 30)
    assert _adapters(node.node).on_disk == 89
    copies = len(node.cache.copies)
    await ensure(node, adapters[0])
    assert len(node.cache.copies) == copies


@on_a_small_node(BASE)
async def test_what_an_earlier_process_shelved_is_taken_over(node: SmallNode) -> None:
    """Of two, one fits the smaller host memory of today. It is checked again, but not fetched."""
    await node.load(BASE)
    one, two = declare(node, 2)
    node.shelf.held = {one.digest: 10, two.digest: 10}
    await node.adapters.start(15)
    assert list(node.shelf.held) == [one.digest]
    assert (await ensure(node, one)).in_host
    assert one.digest not in node.cache.copies
    assert node.library.looked_at == [(one.digest, BASE.digest)]


@on_a_small_node(BASE)
async def test_what_the_catalogue_drops_leaves_host_memory(node: SmallNode) -> None:
    """But not while an engine may be reading it."""
    await node.load(BASE)
    one, two = declare(node, 2)
    await ensure(node, one)
    await node.adapters.turn()
    node.library.declared = {two.name: two}
    await node.adapters.turn()
    assert one.digest in node.shelf.held
    await node.clock.sleep_ms(KEEP_MS)
    await node.adapters.turn()
    node.library.declared = {two.name: two}
    await node.adapters.turn()
    assert one.digest not in node.shelf.held


@on_a_small_node(BASE)
async def test_a_shelf_without_memory_is_no_failure(node: SmallNode) -> None:
    """The adapter is used from disk; the account is as before."""
    await node.load(BASE)
    (adapter,) = declare(node, 1)
    node.shelf.full = True
    assert not (await ensure(node, adapter)).in_host
    assert (node.node.adapters.host.resident, node.node.adapters.host.reserved) == (0, 0)


def check_shelf(node: SmallNode) -> None:
    """What lies in host memory is what the account holds and what may be named or leave."""
    stock = node.node.adapters
    assert set(node.shelf.held) == stock.shelved == set(stock.host.holdings)
    assert stock.host.reserved == 0


@on_a_small_node(BASE, adapter_bytes=25)
async def test_a_caller_that_leaves_at_any_moment_leaves_no_byte_behind(node: SmallNode) -> None:
    """Two of three fit. Whoever asks for the third is gone after 0, 1, 2 … turns of the loop, amid its way in or amid
    the way out of the one that makes room: nothing lies there that nobody answers for; the next caller is served."""
    await node.load(BASE)
    adapters = declare(node, 3)
    node.shelf.turns = 5
    for turns in range(40):
        for adapter in adapters:
            await node.clock.sleep_ms(KEEP_MS)
            await node.adapters.turn()
            asking = asyncio.create_task(ensure(node, adapter))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await node.clock.sleep_ms(1)
            check_shelf(node)
    await node.clock.sleep_ms(KEEP_MS)
    await node.adapters.turn()
    assert [(await ensure(node, adapter)).in_host for adapter in adapters] == [True, True, False]


async def one_copy_deleted(
    node: SmallNode, ensure: Callable[[SmallNode, Adapter], Coroutine[Any, Any, AdapterPlace]]
) -> list[Adapter]:
    """Three adapters of a base that is loaded: two are in host memory, of the first one the copy on disk is gone."""
    adapters = declare(node, 3)
    for adapter in adapters[:2]:
        await ensure(node, adapter)
        await node.clock.sleep_ms(1)
    del node.cache.cached[adapters[0].digest]
    await node.clock.sleep_ms(KEEP_MS)
    await node.adapters.turn()
    return adapters


@on_a_small_node(BASE, adapter_bytes=25)
async def test_a_copy_on_disk_that_somebody_deleted_keeps_nobody_out_of_host_memory(node: SmallNode) -> None:
    """The one that has to leave cannot be found on disk: it just leaves, and is fetched again when it is wanted."""
    await node.load(BASE)
    one, _, three = await one_copy_deleted(node, ensure)
    assert (await ensure(node, three)).in_host
    check_shelf(node)
    assert (await ensure(node, one)).in_host  # the second one makes room
    assert node.cache.copies.count(one.digest) == 2

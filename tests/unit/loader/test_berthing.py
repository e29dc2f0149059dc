"""Adapters over vLLM on a node over fakes in virtual time: names given out in advance, and promises that hold."""

from dataclasses import replace
from pathlib import Path

import msgspec

from roundhouse.catalogue.records import Adapter, Engine, Model
from roundhouse.errors import CapacityExhausted, InvalidInput, RoundhouseError, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.domain.berths import LEAST_BERTHS, AllTaken, Berths, berths_for
from services.loader.domain.instance import State
from services.loader.domain.versions import triton_model_name
from services.loader.operations.adapters import KEEP_MS, AdapterPlace
from services.loader.operations.berthing import REQUEST_MS_MAX, Berthing
from tests.builders.small_node import SmallNode, on_a_small_node, outcome, small_model, small_node, version_of
from tests.fakes.berth_board import FakeBoard
from tests.fakes.clock import run_virtual
from tests.unit.loader.test_adapters import declare, one_copy_deleted, order_of

BASE: Model = msgspec.structs.replace(small_model("base"), engine=Engine.VLLM, adapter_slots=2)
BARE: Model = msgspec.structs.replace(small_model("base"), engine=Engine.VLLM)
NAME = triton_model_name(version_of(BASE))
RUNS_MS = 120_000


async def ensure(node: SmallNode, adapter: Adapter, *, use_ms: int = RUNS_MS) -> AdapterPlace:
    """Have it on the node, for requests that run so long."""
    return await node.adapters.ensure(replace(order_of(adapter), use_ms=use_ms))


def leads_to(node: SmallNode) -> dict[int, Path]:
    """Where the instance finds its numbers now."""
    berths = node.library.berths[-1]
    assert berths is not None
    return node.board.leads_to[berths.folder]


def test_a_number_means_one_content_in_one_load() -> None:
    """Three names: who has one keeps it, a fourth content gets none."""
    berths = Berths("ab", "/berths/ab", 3, 16)
    numbers = [berths.take(digest) for digest in ("a", "b", "a", "c", "d", "b")]  # type: ignore[arg-type]
    assert numbers == [0, 1, 0, 2, AllTaken(3), 1]
    assert berths.called(2) == "ab-2"
    assert (berths_for(10), berths_for(5_000)) == (LEAST_BERTHS, 20_000)


@on_a_small_node(BASE, adapter_bytes=1_000)
async def test_the_instance_is_told_names_before_adapters_are_there(node: SmallNode) -> None:
    """The package has 8,192 names and no adapter; requests get the next name, each content its own, whoever asks."""
    await node.load(BASE)
    (berths,) = node.library.berths
    assert berths is not None
    assert (berths.count, berths.rank_max) == (8_192, 16)
    one, two = declare(node, 2)
    places = [await ensure(node, each) for each in (one, two, one)]
    assert [place.engine_name for place in places] == ["load1-0", "load1-1", "load1-0"]
    assert leads_to(node) == {0: node.shelf.path(one.digest), 1: node.shelf.path(two.digest)}


@on_a_small_node(BASE, adapter_bytes=25)
async def test_an_adapter_moves_and_its_number_follows(node: SmallNode) -> None:
    """Two of 10 fit into 25 of host memory. The third takes the place of the first, which is found on disk then, under
    its number."""
    await node.load(BASE)
    one, two, three = declare(node, 3)
    for adapter in (one, two):
        await ensure(node, adapter)
        await node.clock.sleep_ms(1)
    await node.clock.sleep_ms(KEEP_MS)
    await node.adapters.turn()
    await ensure(node, three)
    on_disk = await node.caches.path(one.digest)
    assert leads_to(node) == {0: on_disk, 1: node.shelf.path(two.digest), 2: node.shelf.path(three.digest)}
    assert (await ensure(node, one)).engine_name == "load1-0"


@on_a_small_node(BASE, disk_bytes=110, adapter_bytes=0)
async def test_it_stays_while_a_request_may_still_open_it(node: SmallNode) -> None:
    """100 of 110 are the base's. A request of 120 s was told of the first: the second finds no room before it ended,
    130 s after, however long it waits; and an instance that opens paths at once keeps it for 10."""
    await node.load(BASE)
    one, two = declare(node, 2)
    began_ms = node.clock.monotonic_ms()
    await ensure(node, one)
    hasty = order_of(two, deadline_ms=RUNS_MS)
    assert isinstance(await outcome(node.adapters.ensure(hasty)), CapacityExhausted)
    assert (await ensure(node, two)).engine_name == "load1-1"
    assert RUNS_MS + KEEP_MS <= node.clock.monotonic_ms() - began_ms < RUNS_MS + 2 * KEEP_MS


def test_a_new_load_has_new_names_and_the_next_process_knows_the_old_ones() -> None:
    """After a restart of the loader each adapter has its number, and stays for as long as the longest request. After a
    new load the names are new, so one that a gateway remembers means nothing."""
    board = FakeBoard()

    async def work() -> None:
        async with small_node([BASE], berths=board, adapter_bytes=1_000) as node:
            await node.load(BASE)
            one, two = declare(node, 2)
            assert (await ensure(node, two)).engine_name == "load1-0"
            triton, memory, files = node.control, node.memory, node.cache
        async with small_node([BASE], berths=board, triton=triton, memory=memory, adapter_bytes=1_000) as node:
            declare(node, 2)
            assert node.state(BASE) is State.READY
            promised = node.node.adapters.promised_until_ms
            assert promised == {two.digest: node.clock.now_ms() + REQUEST_MS_MAX}
            assert (await ensure(node, one)).engine_name == "load1-1"
            assert (await ensure(node, two)).engine_name == "load1-0"
            assert files.copies.count(two.digest) == 1
            await node.unload(BASE)
            assert board.opened == {}
            await node.load(BASE)
            assert (await ensure(node, one)).engine_name == "load2-0"

    run_virtual(work())


@on_a_small_node(BASE, adapter_bytes=1_000)
async def test_what_an_instance_cannot_take_is_refused_and_why(node: SmallNode) -> None:
    """A misfit gets no number; no number is left; a link cannot be made; the instance was loaded without room."""
    await node.load(BASE)
    (berths,) = node.library.berths
    assert berths is not None
    wrong, one, two, three = declare(node, 4)
    node.library.misfits[wrong.digest] = "r must be in [1, 16], not 32"
    assert isinstance(await outcome(ensure(node, wrong)), InvalidInput)
    assert berths.taken == {}
    await ensure(node, one)
    node.board.full = True
    assert isinstance(await outcome(ensure(node, two)), Unavailable)
    node.board.full, berths.count = False, 2
    await ensure(node, two)
    error = await outcome(ensure(node, three))
    assert isinstance(error, CapacityExhausted)
    assert "2 adapters were used since the instance was loaded" in error.message


@on_a_small_node(BASE, adapter_bytes=1_000)
async def test_an_instance_without_names_left_is_loaded_again(node: SmallNode) -> None:
    """Two names, three adapters: by itself it leaves and comes back with new ones, and the third has one."""
    await node.load(BASE)
    (berths,) = node.library.berths
    assert berths is not None
    berths.count = 2
    one, two, three = declare(node, 3)
    for adapter in (one, two):
        await ensure(node, adapter)
    assert isinstance(await outcome(ensure(node, three)), CapacityExhausted)
    for _ in range(8):
        await node.adapters.turn()
        await node.clock.sleep_ms(1_000)
    assert node.state(BASE) is State.READY
    assert [place.engine_name for place in [await ensure(node, each) for each in (three, one)]] == [
        "load2-0",
        "load2-1",
    ]
    assert [note.details.get("order") for note in node.audit.notes if note.what == "unload"] == ["adapter-names"]


@on_a_small_node(BASE, small_model("guest", 400), adapter_bytes=1_000)
async def test_one_that_has_to_make_room_does_not_come_back_for_its_names(node: SmallNode) -> None:
    """The scheduler gave its place to another: what it lacked is forgotten."""
    guest = small_model("guest", 400)
    await node.load(BASE)
    (berths,) = node.library.berths
    assert berths is not None
    berths.count = 0
    (adapter,) = declare(node, 1)
    assert isinstance(await outcome(ensure(node, adapter)), CapacityExhausted)
    await node.load(guest, first=(BASE,))
    for _ in range(4):
        await node.adapters.turn()
        await node.clock.sleep_ms(1_000)
    assert (node.state(guest), node.state(BASE)) == (State.READY, State.STAGED)


@on_a_small_node(BARE, adapter_bytes=1_000)
async def test_a_base_that_was_given_room_after_it_was_loaded(node: SmallNode) -> None:
    """Its instance knows no names: never the base alone under an adapter's name. Loaded again, it has them."""
    await node.load(BARE)
    (adapter,) = declare(node, 1)
    node.library.models[version_of(BASE)] = BASE
    error: RoundhouseError | None = await outcome(ensure(node, adapter))
    assert isinstance(error, Unavailable)
    assert "loaded without room for adapters" in error.message
    await node.adapters.turn()  # and nothing is staged ahead for it
    await node.clock.sleep_ms(1_000)
    assert adapter.digest not in node.cache.copies
    await node.unload(BARE)
    await node.load(BASE)
    assert (await ensure(node, adapter)).engine_name == "load1-0"


@on_a_small_node(BASE, adapter_bytes=25)
async def test_a_promised_adapter_whose_copy_on_disk_was_deleted_stays_where_its_link_leads(node: SmallNode) -> None:
    """Requests that run may still open it. The next oldest makes room instead."""
    await node.load(BASE)
    one, two, three = await one_copy_deleted(node, ensure)
    assert (await ensure(node, three)).in_host
    assert leads_to(node)[0] == node.shelf.path(one.digest)
    assert leads_to(node)[1] == await node.caches.path(two.digest)
    assert set(node.shelf.held) == {one.digest, three.digest}


class RestlessBoard(FakeBoard):
    """While a link is made, another instance leaves."""

    berthing: Berthing

    async def point(self, berths: Berths, number: int, target: Path) -> None:
        """See `BerthBoard.point`."""
        await self.berthing.leave("b")
        await super().point(berths, number, target)


@on_a_small_node(BASE)
async def test_an_adapter_moves_while_instances_come_and_go(node: SmallNode) -> None:
    """Two instances have it; the second leaves while the first one's link is made: the move goes on."""
    digest = Digest("sha256:1")
    board = RestlessBoard()
    board.opened = {name: Berths(name, f"/berths/{name}", 9, 16, {digest: 0}) for name in ("a", "b", "c")}
    board.leads_to = {each.folder: {} for each in board.opened.values()}
    board.berthing = Berthing(node.node, board, node.library, node.clock, node.steps)
    await board.berthing.start()
    await board.berthing.follow(digest, Path("/disk"))
    assert board.leads_to == {"/berths/a": {0: Path("/disk")}, "/berths/c": {0: Path("/disk")}}

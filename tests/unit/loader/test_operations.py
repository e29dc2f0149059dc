"""The loader's operations over fakes in virtual time: sharing, room, failures, and what Triton turns out to have."""

import asyncio
from pathlib import Path

import pytest

from roundhouse.errors import (
    CapacityExhausted,
    Conflict,
    DeadlinePassed,
    EngineFailed,
    InvalidInput,
    NotFound,
    Unavailable,
)
from services.loader.device_ports import Setting
from services.loader.domain.instance import State
from services.loader.domain.versions import triton_model_name
from services.loader.operations.admission import NEVER_FITS
from services.loader.operations.ensure import LoadOrder
from tests.builders.small_node import (
    SmallNode,
    on_a_small_node,
    outcome,
    small_model,
    small_node,
    source_of,
    version_of,
)
from tests.fakes.clock import run_virtual

A, B, C = small_model("a"), small_model("b"), small_model("c")
WIDE, GIANT = small_model("wide", 350), small_model("giant", 500)
MODELS = (A, B, C, WIDE, GIANT)


@on_a_small_node(*MODELS)
async def test_twenty_callers_share_one_load(node: SmallNode) -> None:
    """B17, invariant 7: one copy, one backend load, one entry in the ledger; everybody sees progress."""
    node.cache.stage_ms = 500
    answers = await asyncio.gather(*(node.load(A, 1) for _ in range(20)))
    assert all([step.state for step in answer][-1] is State.READY for answer in answers)
    assert all(State.STAGING in {step.state for step in answer} for answer in answers)
    assert node.cache.copies == [A.digest]
    assert node.control.loads == [triton_model_name(version_of(A))]
    assert node.device == (100, 0)


@on_a_small_node(*MODELS)
async def test_a_slow_caller_hears_of_the_end_too(node: SmallNode) -> None:
    """It becomes ready while the caller takes its progress of before: the last one it gets is READY all the same."""
    node.library.knobs[A.name] = {"load_ms": "100"}
    states = []
    async for progress in node.orders.ensure_loaded(LoadOrder(version_of(A), 1)):
        states.append(progress.state)
        await asyncio.sleep(1)
    assert states[-1] is State.READY
    assert states.count(State.READY) == 1


@on_a_small_node(*MODELS)
async def test_a_caller_that_leaves_stops_nothing(node: SmallNode) -> None:
    """The first caller is cancelled in the middle; the load goes on for the second."""
    node.library.knobs[A.name] = {"load_ms": "1000"}
    first, second = (asyncio.create_task(node.load(A, 1)) for _ in range(2))
    await asyncio.sleep(0.5)
    first.cancel()
    assert (await second)[-1].state is State.READY
    assert len(node.control.loads) == 1


@on_a_small_node(*MODELS)
async def test_a_callers_deadline_ends_its_wait_not_the_load(node: SmallNode) -> None:
    """DeadlinePassed after 100 ms; the model is ready after a second all the same."""
    node.library.knobs[A.name] = {"load_ms": "1000"}
    with pytest.raises(DeadlinePassed):
        await node.load(A, deadline_ms=100)
    await asyncio.sleep(1)
    assert node.state(A) is State.READY


@on_a_small_node(*MODELS)
async def test_victims_stay_until_the_weights_are_there(node: SmallNode) -> None:
    """While the new one is staged, whoever must leave takes no new request but is still loaded."""
    for model in (A, B, C):
        await node.load(model)
    node.cache.stage_ms = 1000
    loading = asyncio.create_task(node.load(WIDE, first=(A, B, C)))
    await asyncio.sleep(0.5)
    # 400 - 300 = 100 free is reserved at once; 350 needs 250 more: all three.
    assert [node.state(model) for model in (A, B, C)] == [State.DRAINING] * 3
    assert node.device == (300, 100)
    assert node.control.unloads == []
    await loading
    assert node.device == (350, 0)
    assert [note.details["made_room_for"] for note in node.audit.notes if note.what == "unload"] == [
        str(version_of(WIDE))
    ] * 3


@on_a_small_node(*MODELS)
async def test_bad_weights_evict_nobody(node: SmallNode) -> None:
    """Invariant 6: staging fails, the ledger is as before, the promised instances are ready again."""
    for model in (A, B, C):
        await node.load(model)
    before = node.node.device
    node.cache.sources[WIDE.source_path] = source_of(A)
    with pytest.raises(EngineFailed) as failed:
        await node.load(WIDE, first=(A, B, C))
    assert failed.value.retry_after_ms == 1_000
    assert [node.state(model) for model in (A, B, C, WIDE)] == [State.READY] * 3 + [State.FAILED]
    assert node.node.device == before
    assert node.control.unloads == []


@on_a_small_node(*MODELS)
async def test_what_never_fits_and_what_does_not_fit_now(node: SmallNode) -> None:
    """B22: 500 of 400 never fits; 350 beside 300 that may not all leave does not fit now. Nothing moves either way."""
    for model in (A, B, C):
        await node.load(model)
    before, copies = node.node.device, list(node.cache.copies)
    with pytest.raises(InvalidInput) as never:
        await node.load(GIANT, first=(A, B, C))
    assert never.value.code == NEVER_FITS
    with pytest.raises(CapacityExhausted):
        await node.load(WIDE, first=(A, B))
    assert node.node.device == before
    assert node.cache.copies == copies
    assert [node.state(model) for model in (A, B, C)] == [State.READY] * 3
    assert node.measurements.loads[-2:] == [("giant", "refused"), ("wide", "refused")]


@on_a_small_node(*MODELS)
async def test_freed_bytes_go_to_whom_they_were_promised(node: SmallNode) -> None:
    """Invariant 6: a third load that comes while victims leave cannot take their room."""
    for model in (A, B, C):
        await node.load(model)
    node.control.begin_request(triton_model_name(version_of(A)))
    loading = asyncio.create_task(node.load(WIDE, first=(A, B, C)))
    await asyncio.sleep(1)
    assert node.state(A) is State.UNLOADING
    with pytest.raises(CapacityExhausted):
        await node.load(B)
    node.control.end_request(triton_model_name(version_of(A)))
    assert (await loading)[-1].state is State.READY
    assert node.device == (350, 0)


@on_a_small_node(*MODELS)
async def test_a_victim_that_is_wanted_again_stays(node: SmallNode) -> None:
    """A newer load order takes a promised instance back; the load that counted on it fails and frees its bytes."""
    for model in (A, B, C):
        await node.load(model)
    node.cache.stage_ms = 1000
    loading = asyncio.create_task(node.load(WIDE, first=(A, B, C)))
    await asyncio.sleep(0.5)
    assert (await node.load(A))[-1].state is State.READY
    with pytest.raises(EngineFailed):
        await loading
    assert node.state(A) is State.READY
    await node.steps.settle(10_000)
    assert node.device == (100, 0)


@on_a_small_node(*MODELS)
async def test_bytes_are_held_until_the_index_says_unavailable(node: SmallNode) -> None:
    """Invariant 8: a running request ends first; only then is the memory free and the caller answered."""
    await node.load(A)
    name = triton_model_name(version_of(A))
    node.control.begin_request(name)
    unloading = asyncio.create_task(node.unload(A))
    await asyncio.sleep(3)
    assert node.state(A) is State.UNLOADING
    assert node.device == (100, 0)
    node.control.end_request(name)
    assert await unloading
    assert node.device == (0, 0)


@on_a_small_node(*MODELS)
async def test_a_load_that_meets_an_unload_waits_for_it(node: SmallNode) -> None:
    """B17, invariant 9: in Triton it leaves for a second; the load begins with its own bytes after that."""
    node.library.knobs[A.name] = {"unload_ms": "1000"}
    await node.load(A)
    unloading = asyncio.create_task(node.unload(A))
    await asyncio.sleep(0.5)
    assert node.state(A) is State.UNLOADING
    assert (await node.load(A))[-1].state is State.READY
    assert isinstance(await outcome(unloading), Conflict)
    assert node.device == (100, 0)
    assert len(node.control.loads) == 2


@on_a_small_node(*MODELS)
async def test_a_hung_load_holds_its_bytes_and_tells_its_callers(node: SmallNode) -> None:
    """After 10 s of the load's limit and 5 s more the caller knows; bytes are free when Triton is done with it."""
    node.library.knobs[A.name] = {"load_ms": "60000"}
    began_ms = node.clock.monotonic_ms()
    with pytest.raises(EngineFailed):
        await node.load(A)
    assert node.clock.monotonic_ms() - began_ms <= 10_000 + 5_000 + 100
    assert node.device == (0, 100)
    await asyncio.sleep(60)
    assert node.state(A) is State.FAILED
    assert node.device == (0, 0)


@on_a_small_node(*MODELS)
async def test_what_triton_lost_is_marked_and_freed(node: SmallNode) -> None:
    """A restarted Triton is empty: one turn later nothing is loaded there, and what was wanted comes back by itself."""
    await node.load(A)
    await node.load(B)
    await node.unload(B)
    node.control.restart()
    await node.watch.turn()
    assert node.device == (0, 0)
    assert node.measurements.unloads == ["ordered", "lost"]
    assert (await node.load(A))[-1].state is State.READY
    assert [node.state(A), node.state(B)] == [State.READY, State.STAGED]
    assert node.audit.notes[-1].reason == "reconcile"


@on_a_small_node(*MODELS)
async def test_a_load_that_ends_while_the_index_is_read_is_not_lost(node: SmallNode) -> None:
    """The answer of the index is older than the instance: it proves nothing."""
    node.library.knobs[A.name] = {"load_ms": "3"}
    loading = asyncio.create_task(node.load(A))
    while not loading.done():
        await node.watch.turn()
        await asyncio.sleep(0.001)
    await node.watch.turn()
    assert node.state(A) is State.READY
    assert node.device == (100, 0)


@on_a_small_node(*MODELS)
async def test_a_silent_triton_takes_the_node_out_of_service(node: SmallNode) -> None:
    """B48: one turn of at most 2.5 s; loads are refused with the reason; back with the first answer."""
    node.control.hung = True
    began_ms = node.clock.monotonic_ms()
    await node.watch.turn()
    assert node.clock.monotonic_ms() - began_ms <= 2_500 - 1_000
    assert not node.node.accepting
    with pytest.raises(Unavailable):
        await node.load(A)
    node.control.hung = False
    await node.watch.turn()
    assert node.node.accepting


def test_a_new_process_adopts_what_fits_and_unloads_the_rest() -> None:
    """Known models are ready with their bytes; unknown ones, and known ones without room, are unloaded."""

    async def work() -> None:
        async with small_node(MODELS) as old:
            for model in (A, B):
                await old.load(model)
            await old.control.load(
                "stranger--1", await old.library.package(A, Path("/"), None, Setting()), timeout_ms=9
            )
        async with small_node((A, B), device_bytes=150) as new:
            new.watch._control = old.control
            await new.watch.turn()
            assert sorted((new.state(A), new.state(B))) == [State.READY, State.REGISTERED]
            assert new.device == (100, 0)
            assert new.measurements.unloads == ["unknown", "unknown"]
            assert "stranger--1" in old.control.unloads

    run_virtual(work())


@on_a_small_node(*MODELS)
async def test_without_a_catalogue_nothing_is_unloaded(node: SmallNode) -> None:
    """An unknown name proves nothing before the catalogue was read; the node waits instead."""
    await node.control.load("m--1", await node.library.package(A, Path("/"), None, Setting()), timeout_ms=9)
    node.library.is_known = False
    await node.watch.turn()
    assert node.control.unloads == []
    assert not node.node.accepting


@on_a_small_node(*MODELS, disk_bytes=250)
async def test_the_disk_cache_gives_up_what_was_not_used_longest(node: SmallNode) -> None:
    """Two of 100 fit into 250; the third needs one to go, and it is not the one that is loaded."""
    await node.load(A)
    await node.unload(A)
    await node.load(B)
    await node.load(C)
    assert set(node.cache.cached) == {B.digest, C.digest}
    assert node.state(A) is State.REGISTERED
    assert (node.node.disk.resident, node.node.disk.reserved) == (200, 0)


@on_a_small_node(*MODELS, disk_bytes=250)
async def test_weights_in_use_are_never_dropped_from_disk(node: SmallNode) -> None:
    """With two loaded and no room for a third on disk, the third is refused and nothing was deleted."""
    await node.load(A)
    await node.load(B)
    with pytest.raises(CapacityExhausted):
        await node.load(C)
    assert set(node.cache.cached) == {A.digest, B.digest}


@on_a_small_node(*MODELS)
async def test_orders_that_cross(node: SmallNode) -> None:
    """B17: the older of two opposite orders is told; what is unknown is not found; draining refuses."""
    node.library.knobs[A.name] = {"load_ms": "1000"}
    loading = asyncio.create_task(node.load(A, 1))
    await asyncio.sleep(0.5)
    assert await node.unload(A, 2)
    assert isinstance(await outcome(loading), Conflict)
    assert isinstance(await outcome(node.load(A, 1)), Conflict)
    assert isinstance(await outcome(node.load(small_model("nobody"))), NotFound)
    assert not await node.unload(small_model("nobody"))
    node.node.start_draining()
    assert isinstance(await outcome(node.load(B)), Unavailable)


@on_a_small_node(*(small_model(name, 200) for name in "abc"))
async def test_a_permission_to_unload_ends(node: SmallNode) -> None:
    """Given by a scheduler that then slept: others use A by now, so it stays. In time it leaves."""
    a, b, c = (small_model(name, 200) for name in "abc")
    await node.load(a)
    await node.load(b)
    late = node.clock.now_ms() - 1
    assert isinstance(await outcome(node.load(c, first=[a], unload_until_ms=late)), CapacityExhausted)
    assert (node.state(a), node.state(b)) == (State.READY, State.READY)
    await node.load(c, first=[a], unload_until_ms=node.clock.now_ms() + 1_000, reason="operator")
    assert (node.state(a), node.state(c)) == (State.STAGED, State.READY)

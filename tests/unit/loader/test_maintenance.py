"""Maintenance, what the next process must know, measured sizes, and models that do not leave."""

import asyncio

from roundhouse.errors import Conflict, Unavailable
from services.loader.domain.instance import State
from services.loader.domain.versions import triton_model_name
from services.loader.operations.ensure import BROKEN, IDLE, UnloadOrder
from services.loader.operations.maintenance import Maintenance, Recollection
from services.loader.operations.watch_triton import LOST_MAX
from services.loader.ports import Remembered
from tests.builders.small_node import (
    FakeNodeMemory,
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
WIDE = small_model("wide", 350)
OPEN = small_model("open", 0)  # the catalogue leaves its size open
MODELS = (A, B, C, WIDE, OPEN)


def name_of(model: object) -> str:
    """Its name in Triton."""
    return triton_model_name(version_of(model))  # type: ignore[arg-type]


@on_a_small_node(*MODELS)
async def test_a_drained_node_ends_empty_and_takes_nothing(node: SmallNode) -> None:
    """A request still runs on A: it ends first. Then nothing stands there, and loads and pre-warms are refused."""
    await node.load(A)
    await node.load(B)
    node.control.begin_request(name_of(A))
    await node.maintenance.begin("new driver")
    following = asyncio.create_task(_follow(node))
    await asyncio.sleep(2)
    assert (node.state(A), node.state(B)) == (State.UNLOADING, State.STAGED)
    assert node.node.not_accepting_reason == "in maintenance: new driver"
    assert isinstance(await outcome(node.load(C)), Unavailable)
    assert isinstance(await outcome(node.stage(C)), Unavailable)
    assert not following.done()
    node.control.end_request(name_of(A))
    await following
    assert node.device == (0, 0)
    await node.maintenance.end()
    assert (await node.load(C))[-1].state is State.READY


async def _follow(node: SmallNode) -> None:
    async for _ in node.maintenance.until_empty():
        pass


@on_a_small_node(*MODELS)
async def test_a_load_that_runs_is_ended_by_maintenance(node: SmallNode) -> None:
    """Staging stops at once; a load in Triton is unloaded when it is through."""
    node.cache.stage_ms = 60_000
    loading = asyncio.create_task(node.load(A))
    await asyncio.sleep(0.5)
    await node.maintenance.begin("now")
    assert isinstance(await outcome(loading), Conflict)
    await _follow(node)
    assert node.state(A) is State.REGISTERED


def test_maintenance_outlives_the_process() -> None:
    """A loader that is restarted on a drained node does not take work; ended, the next one does."""

    async def work() -> None:
        memory = FakeNodeMemory()
        async with small_node(MODELS, memory=memory) as old:
            await old.maintenance.begin("new driver")
        async with small_node(MODELS, memory=memory) as new:
            assert not new.node.accepting
            await new.maintenance.end()
        assert memory.remembered == Remembered()
        async with small_node(MODELS, memory=memory) as last:
            assert last.node.accepting

    run_virtual(work())


def test_a_dead_model_is_known_to_the_next_process() -> None:
    """Its unload was never confirmed and the loader died: the next one does not hold its bytes, as the index asks."""

    async def work() -> None:
        memory = FakeNodeMemory()
        async with small_node(MODELS, memory=memory) as old:
            await old.load(A)
            old.control.begin_request(name_of(A))  # of a process that is gone: it never ends
            order = UnloadOrder(version_of(A), 0, reason=BROKEN)
            assert await old.orders.ensure_unloaded(order)
            await old.watch.turn()
            control = old.control
        assert memory.remembered.dead == (name_of(A),)
        async with small_node(MODELS, memory=memory, triton=control) as new:
            await new.watch.turn()
            assert new.device == (0, 0)
            assert new.state(A) is State.REGISTERED

    run_virtual(work())


@on_a_small_node(*MODELS)
async def test_a_measured_size_replaces_an_estimate_and_no_declaration(node: SmallNode) -> None:
    """The estimate of 0 becomes 70; A's declared 100 stays, whatever its process takes. The next load reserves 70."""
    node.processes.pids, node.processes.bytes_each = {name_of(OPEN): [7], name_of(A): [8]}, 70
    await node.load(OPEN)
    await node.load(A)
    await asyncio.sleep(0)
    assert node.device == (170, 0)
    await node.unload(OPEN)
    node.library.knobs[OPEN.name] = {"load_ms": "1000"}
    loading = asyncio.create_task(node.load(OPEN))
    await asyncio.sleep(0.5)
    assert node.device == (100, 70)
    await loading


@on_a_small_node(*MODELS)
async def test_a_model_that_takes_more_than_there_is_is_told(node: SmallNode) -> None:
    """Invariant 6: the account cannot hold 500 of 400; it keeps the estimate and the audit stream says so."""
    node.processes.pids, node.processes.bytes_each = {name_of(OPEN): [7]}, 500
    await node.load(OPEN)
    await asyncio.sleep(0)
    assert node.device == (0, 0)
    assert [note.what for note in node.audit.notes] == ["load", "over-budget"]


@on_a_small_node(*MODELS)
async def test_a_victim_that_triton_does_not_let_go_is_ended(node: SmallNode) -> None:
    """Nobody runs there, its evictor has seen to that, and Triton still waits: after 5 s its process is ended."""
    for model in (A, B, C):
        await node.load(model)
    node.processes.pids = {name_of(A): [11]}
    node.control.begin_request(name_of(A))  # a request that Triton forgot to end
    began_ms = node.clock.monotonic_ms()
    await node.load(WIDE, first=(A, B, C))
    assert node.processes.ended == [11]
    assert 5_000 <= node.clock.monotonic_ms() - began_ms <= 12_000
    assert node.device == (350, 0)


@on_a_small_node(*MODELS)
async def test_an_ordered_unload_is_patient(node: SmallNode) -> None:
    """Requests may run for minutes; after five of them the model is ended."""
    await node.load(A)
    node.processes.pids = {name_of(A): [11]}
    node.control.begin_request(name_of(A))
    unloading = asyncio.create_task(node.unload(A))
    await asyncio.sleep(290)
    assert node.processes.ended == []
    await asyncio.sleep(30)
    assert node.processes.ended == [11]
    assert await unloading


@on_a_small_node(*MODELS)
async def test_a_model_that_leaves_and_that_nobody_uses_is_ended_in_seconds(node: SmallNode) -> None:
    """Unloaded by order; after 20 s the scheduler says that nobody is on it: the patience of an eviction is over."""
    await node.load(A)
    node.processes.pids = {name_of(A): [11]}
    node.control.begin_request(name_of(A))  # a request that Triton forgot to end
    unloading = asyncio.create_task(node.unload(A))
    await asyncio.sleep(20)
    assert node.processes.ended == []
    assert await node.orders.ensure_unloaded(UnloadOrder(version_of(A), 0, reason=IDLE))
    await asyncio.sleep(6)
    assert node.processes.ended == [11]
    assert await unloading
    await node.load(A)
    assert not node.node.residences[version_of(A)].idle


@on_a_small_node(*MODELS)
async def test_nothing_is_unloaded_because_nobody_uses_it(node: SmallNode) -> None:
    """The order comes late, when the model is ready again: it stays, and its next unload is patient."""
    await node.load(A)
    assert await node.orders.ensure_unloaded(UnloadOrder(version_of(A), 0, reason=IDLE))
    await asyncio.sleep(20)
    assert node.state(A) is State.READY
    assert not node.node.residences[version_of(A)].idle


@on_a_small_node(*MODELS)
async def test_an_unload_of_a_model_without_process_ends(node: SmallNode) -> None:
    """Triton waits for requests of a process that is gone: it cannot be seen any more, so its memory is free."""
    await node.load(A)
    node.processes.pids = {name_of(A): []}
    node.control.begin_request(name_of(A))
    assert await node.unload(A)
    assert node.device == (0, 0)


@on_a_small_node(*MODELS, device_bytes=400)
async def test_a_later_caller_may_offer_more_to_leave(node: SmallNode) -> None:
    """The load of 350 beside A, B and C of 100 was promised A, B and C; A came into use again, so 250 of 350 are
    there. OPEN, of 100 by now, is offered by a caller that joins: it leaves, and the load goes on without A."""
    node.node.measured[(version_of(OPEN), 1)] = 100
    for model in (A, B, OPEN):
        await node.load(model)
    two = small_model("two", 250)
    node.library.models[version_of(two)], node.cache.sources[two.source_path] = two, source_of(two)
    node.cache.stage_ms = 1_000
    first = asyncio.create_task(node.load(two, first=(A, B)))
    await asyncio.sleep(0.5)
    await node.load(A)  # 400 - 100 of A = 300, but OPEN has 100 of them
    second = asyncio.create_task(node.load(two, first=(OPEN,)))
    assert (await first)[-1].state is State.READY
    assert (await second)[-1].state is State.READY
    assert [node.state(model) for model in (A, B, OPEN)] == [State.READY, State.STAGED, State.STAGED]
    assert node.device == (350, 0)


@on_a_small_node(*MODELS)
async def test_what_takes_triton_down_again_and_again_does_not_come_back(node: SmallNode) -> None:
    """Lost three times in five minutes it comes back by itself; the fourth time it waits for an order."""
    await node.load(A)
    for _ in range(LOST_MAX):
        node.control.restart()
        await node.watch.turn()
        await asyncio.sleep(5)
        assert node.state(A) is State.READY
    node.control.restart()
    await node.watch.turn()
    await asyncio.sleep(5)
    assert node.state(A) is State.STAGED
    assert (await node.load(A))[-1].state is State.READY


class SlowMemory(FakeNodeMemory):
    """A disk on which the first write takes a second."""

    writes, writing = 0, False

    async def keep(self, remembered: Remembered) -> None:
        """See `NodeMemory.keep`."""
        assert not self.writing, "one file, one writer"
        self.writing, self.writes = True, self.writes + 1
        await asyncio.sleep(1 if self.writes == 1 else 0)
        self.remembered, self.writing = remembered, False


@on_a_small_node(*MODELS)
async def test_the_last_word_is_the_one_that_is_remembered(node: SmallNode) -> None:
    """While the watch writes that a model died, an operator begins maintenance: both are known to the next process."""
    memory = SlowMemory()
    recollection = Recollection(node.node, memory)
    node.node.dead.add("m--1")
    first = asyncio.create_task(recollection.keep())
    await asyncio.sleep(0.1)
    node.node.maintenance = "new fan"
    await recollection.keep()
    await first
    assert (memory.remembered.maintenance, memory.remembered.dead) == ("new fan", ("m--1",))


@on_a_small_node(*MODELS)
async def test_who_ordered_maintenance_and_left_at_once_stopped_nothing(node: SmallNode) -> None:
    """Amid the write, the caller hangs up: the node empties all the same, and the watch has it remembered."""
    await node.load(A)
    maintenance = Maintenance(node.node, node.steps, node.prestage, Recollection(node.node, SlowMemory()))
    calling = asyncio.create_task(maintenance.begin("new fan"))
    await asyncio.sleep(0.1)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    await asyncio.sleep(2)
    await node.watch.turn()
    assert node.state(A) is State.STAGED
    assert node.memory.remembered.maintenance == "new fan"


@on_a_small_node(*MODELS)
async def test_a_process_that_may_not_be_ended_holds_its_memory_and_nothing_else(node: SmallNode) -> None:
    """The loader is not Triton's user: the model goes on leaving, its bytes stay held, and other orders are taken."""
    await node.load(A)
    node.processes.pids = {name_of(A): [11]}
    node.processes.why_not = "this process may not end process 11"
    node.control.begin_request(name_of(A))
    unloading = asyncio.create_task(node.unload(A))
    await asyncio.sleep(330)
    assert (node.state(A), node.device) == (State.UNLOADING, (100, 0))
    assert (await node.load(B))[-1].state is State.READY
    node.control.end_request(name_of(A))
    assert await unloading
    assert node.processes.ended == []

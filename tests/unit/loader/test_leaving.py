"""Callers that leave at any moment, over fakes in virtual time: what they began ends as if they had never come."""

import asyncio

from roundhouse.errors import Conflict
from services.loader.domain.instance import State
from services.loader.domain.staging_priority import Priority
from services.loader.operations.node import weights_of
from tests.builders.small_node import SmallNode, on_a_small_node, outcome, small_model

ONE, TWO, THREE = (small_model(name) for name in ("one", "two", "three"))


def check(node: SmallNode) -> None:
    """Nothing is on its way, and the accounts hold what is there."""
    disk, host = node.node.disk, node.node.host.ledger
    assert (disk.reserved, host.reserved) == (0, 0)
    assert set(disk.contents) == set(node.node.on_disk) == set(node.cache.cached)
    assert node.cache.contents == {file.sha256 for each in node.cache.cached.values() for file in each.files}
    assert all(host.is_whole(each) for each in host.contents)
    assert {each.digest for each in node.arena.recorded} == set(host.contents)


@on_a_small_node(ONE, TWO, THREE, disk_bytes=250, host_bytes=250)
async def test_a_staging_that_is_given_up_at_any_moment_leaves_nothing(node: SmallNode) -> None:
    """Two of three fit on disk and in host memory; each comes by turns and is given up a little later each time, amid
    its way to disk, to host memory, or while the arena's index is written."""
    node.cache.stage_ms = node.arena.fill_ms = node.arena.record_ms = 20
    for patience_ms in range(0, 120, 5):
        for model in (ONE, TWO, THREE):
            stage = node.caches.stage(weights_of(model, node.library), Priority.DEMAND)
            staging = asyncio.create_task(stage)
            await node.clock.sleep_ms(patience_ms)
            staging.cancel()
            await asyncio.gather(staging, return_exceptions=True)
            await node.clock.sleep_ms(100)
            check(node)


@on_a_small_node(ONE)
async def test_who_comes_while_a_staging_is_given_up_begins_a_new_one(node: SmallNode) -> None:
    """The first caller leaves, and its copy takes a moment to stop. The second is not told that he left himself."""
    node.cache.stage_ms, node.cache.stop_ms = 1_000, 300
    weights = weights_of(ONE, node.library)
    first = asyncio.create_task(node.caches.stage(weights, Priority.DEMAND))
    await node.clock.sleep_ms(100)
    first.cancel()
    await node.clock.sleep_ms(100)
    await node.caches.stage(weights, Priority.DEMAND)
    assert first.cancelled()
    assert node.cache.copies == [ONE.digest] * 2
    check(node)


@on_a_small_node(ONE)
async def test_an_order_to_stage_after_one_that_took_it_back_is_a_new_one(node: SmallNode) -> None:
    """An unload cancelled the first order, whose copy takes a moment to stop; the second one came later and stands."""
    node.cache.stage_ms, node.cache.stop_ms = 1_000, 300
    first = asyncio.create_task(outcome(node.stage(ONE, to_host=False)))
    await node.clock.sleep_ms(100)
    await node.unload(ONE)
    await node.clock.sleep_ms(100)
    assert (await node.stage(ONE, to_host=False))[-1].state is State.STAGED
    assert isinstance(await first, Conflict)

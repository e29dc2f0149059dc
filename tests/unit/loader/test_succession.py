"""A new version takes over from the old one on a node, over fakes in virtual time (case B19)."""

import asyncio

from roundhouse.catalogue.records import Model
from roundhouse.errors import CapacityExhausted
from services.loader.domain.instance import State
from services.loader.domain.versions import triton_model_name
from services.loader.operations.succession import KEEP_MS, RESTORED, SUPERSEDED
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

OLD = small_model("m", 150)
NEW = small_model("m", 150, version=2)
WIDE = small_model("m", 300, version=3)  # 150 + 300 > 400: only in place of the old one
GIANT = small_model("m", 500, version=4)


def publish(node: SmallNode, new: Model) -> None:
    """The catalogue names another version from now on."""
    node.library.models = {version_of(new): new}
    node.cache.sources[new.source_path] = source_of(new)


@on_a_small_node(OLD, watched=True)
async def test_the_new_version_loads_beside_the_old_one_which_leaves_later(node: SmallNode) -> None:
    """Both are ready for a while; a request that still runs on the old one ends there."""
    await node.load(OLD)
    node.library.knobs[NEW.name] = {"load_ms": "3000"}
    node.control.begin_request(triton_model_name(version_of(OLD)))
    publish(node, NEW)
    await asyncio.sleep(3)
    assert (node.state(OLD), node.state(NEW)) == (State.READY, State.LOADING)
    await asyncio.sleep(5)
    assert (node.state(OLD), node.state(NEW)) == (State.READY, State.READY)
    assert node.device == (300, 0)
    await asyncio.sleep(KEEP_MS / 1000 + 2)
    assert node.state(OLD) is State.UNLOADING
    node.control.end_request(triton_model_name(version_of(OLD)))
    await asyncio.sleep(2)
    assert node.device == (150, 0)
    assert [note.details.get("order") for note in node.audit.notes if note.what == "unload"] == [SUPERSEDED]


@on_a_small_node(OLD, watched=True)
async def test_without_room_for_both_the_gap_is_only_the_load(node: SmallNode) -> None:
    """Staging takes 20 s, during which the old one serves; then it makes room, and the load of 1 s is the gap."""
    await node.load(OLD)
    node.cache.stage_ms = 20_000
    node.library.knobs[WIDE.name] = {"load_ms": "1000"}
    publish(node, WIDE)
    await asyncio.sleep(15)
    assert node.state(OLD) is State.READY
    gap_ms = 0
    while node.state(WIDE) is not State.READY:
        await asyncio.sleep(0.01)
        gap_ms += 10 if node.state(OLD) is not State.READY else 0
    assert gap_ms <= 1_500
    assert node.device == (300, 0)
    assert [note.what for note in node.audit.notes].count("version-gap") == 1


@on_a_small_node(OLD, watched=True)
async def test_bad_weights_leave_the_old_version_serving(node: SmallNode) -> None:
    """Said in the audit stream, tried again later; once mended it takes over."""
    await node.load(OLD)
    publish(node, WIDE)
    node.cache.sources[WIDE.source_path] = source_of(NEW)
    await asyncio.sleep(40)
    assert node.state(OLD) is State.READY
    assert {note.what for note in node.audit.notes} == {"load", "new-version-failed"}
    assert node.control.unloads == []
    publish(node, WIDE)
    await asyncio.sleep(20)
    assert node.state(WIDE) is State.READY


@on_a_small_node(OLD, watched=True)
async def test_a_version_that_cannot_load_leaves_the_old_one_or_gives_its_place_back(node: SmallNode) -> None:
    """Beside: the old one never stops. In its place: it comes back by itself, from host memory."""
    await node.load(OLD)
    node.library.knobs[OLD.name] = {"fail_load": "no such tensor"}
    publish(node, NEW)
    await asyncio.sleep(10)
    assert (node.state(OLD), node.state(NEW)) == (State.READY, State.FAILED)
    assert node.control.unloads == []
    publish(node, WIDE)
    while node.state(WIDE) is not State.FAILED:
        await node.node.changes.next().wait()
    node.library.knobs[OLD.name] = {}
    await asyncio.sleep(3)
    assert (node.state(OLD), node.state(WIDE)) == (State.READY, State.FAILED)
    assert [note.what for note in node.audit.notes].count("restored") == 1
    assert node.audit.notes[-1].reason == RESTORED
    node.library.knobs[OLD.name] = {"fail_load": "no such tensor"}
    unloads = list(node.control.unloads)
    await asyncio.sleep(120)
    assert node.state(OLD) is State.READY
    assert isinstance(await outcome(node.load(WIDE, reason="operator", first=(OLD,))), CapacityExhausted)
    assert node.control.unloads == unloads, "it does not make room for it again, whoever asks"


@on_a_small_node(OLD, watched=True)
async def test_what_never_fits_changes_nothing(node: SmallNode) -> None:
    """B22: 500 of 400: the old version stays, and nobody left for it."""
    await node.load(OLD)
    publish(node, GIANT)
    await asyncio.sleep(60)
    assert node.state(OLD) is State.READY
    assert node.control.unloads == []


@on_a_small_node(OLD, watched=True)
async def test_a_version_that_is_not_loaded_is_not_loaded_by_a_change(node: SmallNode) -> None:
    """Nobody asked for the model here."""
    publish(node, NEW)
    await asyncio.sleep(10)
    assert node.control.loads == []


def test_a_new_process_in_the_middle_of_a_change_goes_on_with_it() -> None:
    """The loader dies while the new version is staged, and the next one finds a catalogue that does not name what
    serves: the old version stays until the new one is ready. Of a model that is gone altogether nothing stays."""
    other = small_model("other", 100)

    async def work() -> None:
        memory = FakeNodeMemory()
        async with small_node([OLD, other], memory=memory, watched=True) as first:
            await first.load(OLD)
            await first.load(other)
            await asyncio.sleep(2)
            control, kept = first.control, memory.remembered  # as a kill -9 leaves it
        memory.remembered = kept
        async with small_node([NEW], memory=memory, triton=control, watched=True) as second:
            assert (second.state(OLD), second.device) == (State.READY, (150, 0))
            assert second.state(other) is State.REGISTERED
            await asyncio.sleep(10)
            assert (second.state(OLD), second.state(NEW)) == (State.READY, State.READY)
            await asyncio.sleep(KEEP_MS / 1000 + 5)
            assert (second.state(NEW), second.device) == (State.READY, (150, 0))
            assert [model.digest for model in memory.remembered.loaded] == [NEW.digest]

    run_virtual(work())

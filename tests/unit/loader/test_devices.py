"""A loader whose node has several devices: where models stand, and memory that does not come back."""

import asyncio

import pytest
from msgspec.structs import replace

from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, EngineFailed, InvalidInput
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.loader.adapters.metrics import PrometheusMeasurements
from services.loader.device_ports import ServerMemory
from services.loader.domain.devices import Device
from services.loader.domain.instance import State
from services.loader.domain.versions import triton_model_name
from services.loader.operations.describe import Identity, describe
from tests.builders.small_node import (
    LEAK_BYTES,
    SmallNode,
    on_a_small_node,
    outcome,
    small_model,
    small_node,
    version_of,
)
from tests.fakes.clock import run_virtual

MB = 2**20
PAIRS = tuple(Device(index, f"d{index}", 100, link_group=index // 2) for index in range(4))
GPUS = tuple(Device(index, f"GPU-{index}", 4_000 * MB, ordinal=index, visible_as=f"GPU-{index}") for index in range(2))
SLICES = tuple(Device(index, f"MIG-{index}", 100, index, "1g.10gb", visible_as=f"MIG-{index}") for index in range(2))
GANG = replace(small_model("gang", 140), tensor_parallel=2)
A, B, C = small_model("a", 60), small_model("b", 60), small_model("c", 60)
LARGE = small_model("large", 101)
WIDE = replace(small_model("wide", 90), tensor_parallel=3)
OPEN = small_model("open", 0)  # its size is not declared
OPEN_GANG = replace(OPEN, tensor_parallel=2)
IDENTITY = Identity("n1", "i", "shared", vocabulary_pb2.NODE_ROLE_MIXED, "triton:1", "loader:2", "kv:3")


def sites(node: SmallNode) -> dict[str, tuple[int, ...]]:
    """What stands on which devices."""
    return {version.model: node.node.device.site_of(version) for version in node.node.residences}


def state(node: SmallNode, clock: Clock | None = None) -> loading_pb2.NodeState:
    """What the node says of itself."""
    return describe(node.node, IDENTITY, node.gauge, 1, clock or node.clock)


@on_a_small_node(GANG, A, B, C, devices=PAIRS)
async def test_a_gang_takes_two_linked_devices_and_others_the_rest(node: SmallNode) -> None:
    """The gang has 70 on each of one pair; A and B, of 60, the devices of the other pair: nowhere else is room."""
    await node.load(GANG, devices=(2, 3))
    await node.load(A)
    await node.load(B)
    assert sites(node) == {"gang": (2, 3), "a": (0,), "b": (1,)}
    told = state(node)
    assert [(each.resident, each.reserved) for each in told.devices] == [(60, 0), (60, 0), (70, 0), (70, 0)]
    assert {each.version.model: tuple(each.devices) for each in told.instances} == sites(node)
    assert told.device_count == 4
    PrometheusMeasurements().tiers(told)
    error = await outcome(node.load(C))
    assert isinstance(error, CapacityExhausted)
    assert error.message.startswith("20 bytes")  # 60 on a device of 100 with 60 taken


@on_a_small_node(GANG, A, B, devices=PAIRS)
async def test_a_gang_without_a_free_pair_takes_nothing(node: SmallNode) -> None:
    """One device of each pair is taken: room for 140 in all, and not for two linked shares."""
    await node.load(A, devices=(1,))
    await node.load(B, devices=(3,))
    before = node.node.device
    assert isinstance(await outcome(node.load(GANG)), CapacityExhausted)
    assert node.node.device == before
    await node.load(GANG, first=(A, B))  # only as many as needed: one of them
    assert node.node.device.site_of(version_of(GANG)) in ((0, 1), (2, 3))
    assert sorted([node.state(A), node.state(B)]) == [State.READY, State.STAGED]


@pytest.mark.parametrize(
    ("model", "devices", "reason"),
    [
        (LARGE, (), "needs 101 bytes of device, this node has 100"),
        (WIDE, (), "needs 30 bytes on each of 3 linked devices, which this node does not have"),
        (GANG, (1, 2), "devices 1, 2 are not of one link group"),
        (GANG, (1,), "it needs 2 devices, 1 were named"),
        (A, (7,), "this node has no device 7"),
        (LARGE, (2,), "needs 101 bytes of device 2, which has 100"),
    ],
)
def test_what_can_never_stand_there_is_refused_at_once(model: object, devices: tuple[int, ...], reason: str) -> None:
    """With the reason, and nobody leaves for it (B22)."""

    async def work() -> None:
        models = (GANG, A, LARGE, WIDE)
        async with small_node(models, devices=PAIRS) as node:
            error = await outcome(node.load(model, devices=devices))  # type: ignore[arg-type]
            assert isinstance(error, InvalidInput)
            assert (error.code, error.message) == ("never_fits", reason)
            assert node.device == (0, 0)

    run_virtual(work())


@on_a_small_node(GANG, A, devices=PAIRS)
async def test_a_failed_gang_gives_everything_back(node: SmallNode) -> None:
    """Invariant 6: the account of each device is as it was."""
    await node.load(A, devices=(0,))
    before = node.node.device
    node.library.knobs[GANG.name] = {"fail_load": "cut off"}
    assert isinstance(await outcome(node.load(GANG)), EngineFailed)
    assert node.node.device == before
    assert not state(node).instances[-1].devices


@on_a_small_node(GANG, A, devices=PAIRS)
async def test_two_gangs_of_one_pair_do_not_hold_half_each(node: SmallNode) -> None:
    """Both want devices 0 and 1 at the same time: one has both, the other is told at once and holds nothing."""
    other = replace(GANG, name=small_model("other").name, source_path=GANG.source_path)
    node.library.models[version_of(other)] = other
    node.cache.stage_ms = 100
    both = await asyncio.gather(outcome(node.load(GANG, devices=(0, 1))), outcome(node.load(other, devices=(0, 1))))
    assert sorted(type(each).__name__ for each in both) == ["CapacityExhausted", "NoneType"]
    assert node.device == (140, 0)


@on_a_small_node(GANG, A, devices=PAIRS, watched=True)
async def test_what_triton_lost_comes_back_to_its_devices(node: SmallNode) -> None:
    """A restarted Triton is given the same models on the same devices."""
    await node.load(GANG, devices=(2, 3))
    await node.load(A, devices=(1,))
    node.control.restart()
    await asyncio.sleep(10)
    assert sites(node) == {"gang": (2, 3), "a": (1,)}
    assert node.device == (200, 0)


def test_a_new_loader_finds_models_on_their_devices() -> None:
    """It is in what Triton was given, so nothing else has to be remembered; a device that is gone is not guessed."""

    async def work() -> None:
        async with small_node((GANG, A), devices=PAIRS) as old:
            await old.load(GANG, devices=(2, 3))
            await old.load(A, devices=(1,))
            async with small_node((GANG, A), devices=PAIRS, triton=old.control) as new:
                assert sites(new) == {"gang": (2, 3), "a": (1,)}
                assert new.device == (200, 0)
            async with small_node((GANG, A), devices=PAIRS[:3], triton=old.control) as fewer:
                assert fewer.device == (60, 0)
                assert old.control.unloads == [triton_model_name(version_of(GANG))]

    run_virtual(work())


@on_a_small_node(A, B, C, devices=SLICES)
async def test_a_slice_with_a_model_on_it_is_not_chosen_for_another(node: SmallNode) -> None:
    """It may be a tenant's own: only a caller who names it shares it."""
    small = replace(C, device_bytes=10)
    node.library.models[version_of(C)] = small
    await node.load(A)
    await node.load(B)
    assert sites(node) == {"a": (0,), "b": (1,)}
    assert isinstance(await outcome(node.load(small)), CapacityExhausted)
    await node.load(small, devices=(1,))
    assert sites(node)["c"] == (1,)


@on_a_small_node(A, B, C, devices=SLICES[:1])
async def test_a_slice_that_is_to_be_a_tenants_alone_is_cleared(node: SmallNode) -> None:
    """A, of 60 of 100, may stand beside B of 30. Whoever has the slice alone waits for both to leave, though the memory
    of one would do; beside it only what is for the same tenant stands, also after a restart of the loader."""
    thin = [replace(each, device_bytes=30) for each in (B, C)]
    for each in thin:
        node.library.models[version_of(each)] = each
    await node.load(A, devices=(0,))
    await node.load(thin[0], devices=(0,))
    assert isinstance(await outcome(node.load(C, devices=(0,), alone_for="x", first=(A,))), CapacityExhausted)
    await node.load(C, devices=(0,), alone_for="x", first=(A, B))
    assert node.device == (30, 0)
    async with small_node([A, *thin], devices=SLICES[:1], triton=node.control) as new:
        assert sites(new) == {"c": (0,)}
        assert isinstance(await outcome(new.load(A, devices=(0,))), CapacityExhausted)
        assert isinstance(await outcome(new.load(A, devices=(0,), alone_for="y")), CapacityExhausted)
        await new.load(B, devices=(0,), alone_for="x")
        assert new.device == (60, 0)


def test_measured_sizes_outlive_the_loader() -> None:
    """On GPUs what NVML says of the model's processes, as much on each device as on the fullest: 2 × 300 MB. The next
    loader reserves that much before the first byte, and adopts as much."""

    async def work() -> None:
        async with small_node((OPEN_GANG,), devices=GPUS) as old:
            old.processes.pids = {triton_model_name(version_of(OPEN)): [7, 8]}
            old.inventory.held = {7: {0: 100 * MB, 1: 300 * MB}, 8: {0: 150 * MB}}
            await old.load(OPEN_GANG)
            await asyncio.sleep(0.1)
            assert old.device == (600 * MB, 0)
            await old.watch.turn()
            async with small_node((OPEN_GANG,), devices=GPUS, memory=old.memory, triton=old.control) as new:
                assert new.device == (600 * MB, 0)
                await new.unload(OPEN_GANG)
                new.library.knobs[OPEN.name] = {"load_ms": "1000"}
                loading = asyncio.create_task(new.load(OPEN_GANG))
                await asyncio.sleep(0.5)
                assert new.device == (0, 600 * MB)
                await loading
            del old.library.models[version_of(OPEN)]
            await old.watch.turn()
            assert old.memory.remembered.measured == ()

    run_virtual(work())


BIG = small_model("big", 1_000 * MB)
HEIR = small_model("heir", 3_500 * MB)


@on_a_small_node(BIG, HEIR, devices=GPUS[:1])
async def test_memory_that_a_gpu_does_not_free_is_nobodys(node: SmallNode) -> None:
    """At first 100 MB are in use beside models. After the unload 900 MB still are, for 10 s: the alarm is raised, and
    800 MB are kept from others until they are free."""
    node.inventory.used = {0: 100 * MB}
    await node.leaks.turn()
    await node.load(BIG)
    node.inventory.used = {0: 900 * MB}
    began_ms = node.clock.monotonic_ms()
    await node.unload(BIG)
    assert 10_000 <= node.clock.monotonic_ms() - began_ms <= 12_000
    assert node.measurements.unfreed == [0]
    assert node.audit.notes[-2].what == "not-freed"
    assert node.device == (800 * MB, 0)
    assert state(node).devices[0].unaccounted == 800 * MB
    assert isinstance(await outcome(node.load(HEIR)), CapacityExhausted)
    node.inventory.used = {0: 100 * MB}
    await node.leaks.turn()
    assert node.device == (0, 0)
    await node.load(HEIR)


@on_a_small_node(BIG, devices=GPUS[:1])
async def test_an_unload_waits_for_the_gpu(node: SmallNode) -> None:
    """The bytes are released when NVML shows them free, 2 s after Triton let go."""
    node.inventory.used = {0: 0}
    await node.leaks.turn()
    await node.load(BIG)
    node.inventory.used = {0: 1_000 * MB}
    unloading = asyncio.create_task(node.unload(BIG))
    await asyncio.sleep(2)
    assert node.device == (1_000 * MB, 0)
    node.inventory.used = {0: 0}
    await unloading
    assert node.device == (0, 0)
    assert node.measurements.unfreed == []


@on_a_small_node(A, B)
async def test_a_triton_that_leaks_is_ended_when_nothing_stands_on_it(node: SmallNode) -> None:
    """Told once when it has grown by more than the bound since the first look, and ended after the last model left.
    The next process is measured from its own beginning."""
    node.processes.beside = ServerMemory(5, 300)
    node.processes.pids = {triton_model_name(version_of(A)): [7]}
    await node.leaks.turn()
    await node.load(A)
    await asyncio.sleep(0.1)
    node.processes.beside = ServerMemory(5, 300 + LEAK_BYTES)
    await node.leaks.turn()
    assert node.audit.notes[-1].what == "load"
    node.processes.beside = ServerMemory(5, 301 + LEAK_BYTES)
    await node.leaks.turn()
    await node.leaks.turn()
    assert [note.what for note in node.audit.notes] == ["load", "leak"]
    assert (node.measurements.grown, node.processes.ended) == ({"server": 1_001}, [])
    await node.unload(A)
    await node.leaks.turn()
    assert [note.what for note in node.audit.notes][-2:] == ["unload", "recycled"]
    assert (node.processes.ended, node.measurements.recycled) == ([5], 1)
    assert node.node.not_accepting_reason == "Triton is being started anew"
    node.control.restart()
    await node.watch.turn()
    node.processes.beside = ServerMemory(6, 9_000)
    await node.leaks.turn()
    assert node.processes.ended == [5]
    assert node.node.accepting


@on_a_small_node(BIG, B, device_bytes=4_000 * MB)
async def test_a_model_in_tritons_own_process_is_no_leak(node: SmallNode) -> None:
    """Triton grows by the 1,000 MB that BIG was reckoned with and by 60 bytes: within the bound. B runs in a process of
    its own, which is not counted in the first place."""
    node.processes.beside = ServerMemory(5, 300)
    await node.leaks.turn()
    node.processes.pids = {triton_model_name(version_of(B)): [7]}
    await node.load(BIG)
    await node.load(B)
    await asyncio.sleep(0.1)
    node.processes.beside = ServerMemory(5, 300 + 1_000 * MB + 60)
    await node.leaks.turn()
    assert node.measurements.grown == {"server": 60}
    assert "leak" not in [note.what for note in node.audit.notes]


@on_a_small_node(A, devices=GPUS[:1])
async def test_a_gpu_that_leaks_is_told_and_not_given_to_models(node: SmallNode) -> None:
    """Where Triton's processes cannot be seen it cannot be ended: the memory is out of the account, and people know."""
    node.inventory.used = {0: 0}
    await node.leaks.turn()
    node.inventory.used = {0: 500 * MB}
    await node.leaks.turn()
    assert [note.what for note in node.audit.notes] == ["leak"]
    assert node.device == (500 * MB, 0)
    assert node.processes.ended == []


@on_a_small_node(A, B)
async def test_a_leaking_triton_that_may_not_be_ended_goes_on_taking_work(node: SmallNode) -> None:
    """It is tried once, and said; the node is not out of service every five seconds from then on."""
    node.processes.beside = ServerMemory(5, 300)
    await node.leaks.turn()
    node.processes.beside = ServerMemory(5, 301 + LEAK_BYTES)
    node.processes.why_not = "the loader may not end process 5"
    before = node.node.changes.next()
    await node.leaks.turn()
    assert before.is_set()
    again = node.node.changes.next()
    await node.leaks.turn()
    assert not again.is_set()
    assert node.node.not_accepting_reason == ""
    assert node.measurements.recycled == 0

"""The tiers below the device over fakes in virtual time: what is shared, who goes first, what stays after a failure."""

import asyncio

import pytest

from roundhouse.catalogue.records import Model
from roundhouse.errors import CapacityExhausted, Conflict, EngineFailed, InvalidInput, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.domain.instance import State
from services.loader.domain.staging_priority import Priority
from services.loader.operations.admission import NEVER_FITS
from services.loader.ports import CachedVersion, Interrupted
from tests.builders.small_node import (
    SmallNode,
    on_a_small_node,
    outcome,
    small_file,
    small_model,
    small_node,
    source_of,
    version_of,
)
from tests.fakes.clock import run_virtual

A, B, C = small_model("a"), small_model("b"), small_model("c")
BASE = small_file("base", 300)
TUNED = [small_model(f"tuned{n}", files=(BASE, small_file(f"head{n}", 50))) for n in range(3)]
UNLISTED = small_model("unlisted", listed=False)
MODELS = (A, B, C, *TUNED, UNLISTED)


@on_a_small_node(*MODELS)
async def test_a_fine_tune_stages_only_what_it_does_not_share(node: SmallNode) -> None:
    """Three of 350 that share 300: 300 + 3 × 50 = 450 bytes on disk, and each content is fetched once."""
    for tuned in TUNED:
        await node.stage(tuned, to_host=False)
    assert node.node.disk.resident == 450
    assert sorted(node.cache.fetched) == sorted({file.sha256 for tuned in TUNED for file in tuned.files})


@on_a_small_node(*MODELS, disk_bytes=420)
async def test_shared_files_stay_while_anybody_has_them(node: SmallNode) -> None:
    """300 + 50 + 50 are there; the third needs 50 and gets them from the oldest's own part, not from what all share."""
    for tuned in TUNED:
        await node.stage(tuned, to_host=False)
    assert node.node.disk.resident == 400
    assert set(node.cache.cached) == {TUNED[1].digest, TUNED[2].digest}
    assert BASE.sha256 in node.cache.contents
    assert node.cache.fetched.count(BASE.sha256) == 1


@on_a_small_node(*MODELS)
async def test_a_version_whose_files_nobody_listed_counts_its_own(node: SmallNode) -> None:
    """Its contents are known only once it is there; the account has them then."""
    await node.stage(UNLISTED, to_host=False)
    assert node.node.disk.resident == 100
    assert source_of(UNLISTED).files[0].sha256 in node.node.disk.pieces


@on_a_small_node(*MODELS)
async def test_a_warm_load_is_given_its_range(node: SmallNode) -> None:
    """Staged to host memory first; the engine is told where; unloading leaves the copy, and nothing is read again."""
    assert [step.state for step in await node.stage(A)][-1] is State.STAGED
    assert node.node.host.ledger.resident == 100
    await node.load(A)
    view = node.library.views[-1]
    assert view is not None
    assert dict(view.ranges) == {A.files[0].name: (node.arena.filled[0].offset, 100)}
    await node.unload(A)
    await node.load(A)
    assert (len(node.arena.filled), node.cache.copies) == (1, [A.digest])


@on_a_small_node(*MODELS, host_bytes=250)
async def test_host_memory_keeps_what_was_used_last_and_what_is_loaded(node: SmallNode) -> None:
    """Two of 100 fit into 250. A is loaded, so the third takes B's range; what does not fit is loaded from disk."""
    await node.load(A)
    await node.stage(B)
    await node.stage(C)
    assert set(node.node.host.ledger.contents) == {A.digest, C.digest}
    await node.load(C)
    await node.load(B)
    assert node.library.views[-1] is None
    assert [set(version.ranges) for version in node.arena.recorded] == [{A.files[0].sha256}, {C.files[0].sha256}]


@on_a_small_node(*TUNED, host_bytes=350)
async def test_a_shared_range_that_goes_with_its_holder_is_read_again(node: SmallNode) -> None:
    """Room for one of two that share 300 of 350: the second evicts the first, and every byte of it is read."""
    await node.stage(TUNED[0])
    await node.stage(TUNED[1])
    assert set(node.node.host.ledger.contents) == {TUNED[1].digest}
    places = {(file.offset, file.size) for file in node.arena.filled[2:]}
    held = node.node.host.ranges
    assert places == {(held[file.sha256].offset, file.size) for file in TUNED[1].files}


@on_a_small_node(*TUNED, host_bytes=350, disk_bytes=400)
async def test_who_leaves_host_memory_or_the_disk_is_told_with_the_reason(node: SmallNode) -> None:
    """Two share 300 and have 50 of their own. The disk of 400 keeps both; host memory of 350 only one: the first leaves
    it 2 s after its last use. A third of the same kind then takes the place of the first on disk, and so of the second
    in host memory."""
    await node.stage(TUNED[0])
    await asyncio.sleep(2)
    await node.stage(TUNED[1])
    notes = [note for note in node.audit.notes if note.what == "evict"]
    left = {"tier": "host", "digest": TUNED[0].digest, "made_room_for": TUNED[1].digest}
    assert [note.version for note in notes] == [version_of(TUNED[0])]
    assert notes[0].details == {**left, "bytes": "350", "bytes_freed": "350", "idle_ms": "2000"}
    await node.stage(TUNED[2])
    told = [(note.details["tier"], note.details["digest"]) for note in node.audit.notes if note.what == "evict"]
    assert told == [("host", TUNED[0].digest), ("disk", TUNED[0].digest), ("host", TUNED[1].digest)]
    assert node.measurements.evictions == ["host", "disk", "host"]


@on_a_small_node(*MODELS)
async def test_two_that_come_at_once_are_both_remembered(node: SmallNode) -> None:
    """The index of host memory takes 100 ms to write. Both come at once: one write follows the other."""
    node.arena.record_ms = 100
    await asyncio.gather(node.stage(A), node.stage(B))
    assert {version.digest for version in node.arena.recorded} == {A.digest, B.digest}


@on_a_small_node(*TUNED)
async def test_a_range_that_another_one_fills_is_waited_for(node: SmallNode) -> None:
    """Invariant 10: both share 300; the second is in host memory only once what the first one reads is."""
    for tuned in TUNED[:2]:
        await node.stage(tuned, to_host=False)
    node.arena.fill_ms = 1_000
    first = asyncio.create_task(node.stage(TUNED[0]))
    await asyncio.sleep(0.5)
    second = asyncio.create_task(node.stage(TUNED[1]))
    await asyncio.sleep(0.2)
    assert not node.node.host.ledger.is_whole(TUNED[1].digest)
    await asyncio.gather(first, second)
    assert node.node.host.ledger.is_whole(TUNED[1].digest)
    assert [file.size for file in node.arena.filled] == [300, 50, 50]


@on_a_small_node(*MODELS, host_bytes=0)
async def test_without_an_arena_everything_loads_from_disk(node: SmallNode) -> None:
    """Nothing is refused for lack of host memory."""
    assert [step.state for step in await node.stage(A)][-1] is State.STAGED
    assert (await node.load(A))[-1].state is State.READY
    assert node.library.views == [None]


@on_a_small_node(*MODELS)
async def test_a_request_goes_before_a_prewarm(node: SmallNode) -> None:
    """Both take 1 s alone. The demand comes second and is done after 1 s; the pre-warm went on after it."""
    node.cache.stage_ms = 1_000
    prewarm = asyncio.create_task(node.stage(A, to_host=False))
    await asyncio.sleep(0.5)
    began_ms = node.clock.monotonic_ms()
    await node.stage(B, to_host=False, reason="demand")
    assert node.clock.monotonic_ms() - began_ms <= 1_100
    assert not prewarm.done()
    await prewarm
    assert node.clock.monotonic_ms() - began_ms <= 1_700


@on_a_small_node(*MODELS)
async def test_a_prewarm_that_a_request_joins_is_promoted(node: SmallNode) -> None:
    """With background work for C before it the pre-warm of A goes first; joined by a load it also beats the next."""
    node.cache.stage_ms = 1_000
    prewarm = asyncio.create_task(node.stage(A, to_host=False))
    await asyncio.sleep(0.1)
    loading = asyncio.create_task(node.load(A, reason="demand"))
    await asyncio.sleep(0.1)
    later = asyncio.create_task(node.stage(C, to_host=False))
    assert (await loading)[-1].state is State.READY
    await prewarm
    assert not later.done()
    assert node.cache.copies == [A.digest, C.digest]
    await later


@on_a_small_node(*TUNED)
async def test_who_shares_a_file_waits_for_it_and_lends_its_priority(node: SmallNode) -> None:
    """The demand needs what the pre-warm fetches: it is fetched once, and the pre-warm is not held up by it."""
    node.cache.stage_ms = 1_000
    prewarm = asyncio.create_task(node.stage(TUNED[0], to_host=False))
    await asyncio.sleep(0.5)
    await node.stage(TUNED[1], to_host=False, reason="demand")
    await prewarm
    assert node.cache.fetched.count(BASE.sha256) == 1


@on_a_small_node(*MODELS)
async def test_a_silent_source_fails_with_its_cause(node: SmallNode) -> None:
    """After 30 s without a byte the callers know why, and the accounts are as before."""
    node.cache.silent.add(A.source_path)
    began_ms = node.clock.monotonic_ms()
    with pytest.raises(EngineFailed, match="sent nothing for 30 s"):
        await node.load(A)
    assert node.clock.monotonic_ms() - began_ms <= 31_000
    assert (node.node.disk.reserved, node.node.disk.resident, node.device) == (0, 0, (0, 0))
    assert isinstance(await outcome(node.stage(A)), Unavailable)


@on_a_small_node(*MODELS)
async def test_an_unload_ends_the_staging(node: SmallNode) -> None:
    """A newer order does not wait for a minute of copying: it is over within a second, and is no failure."""
    node.cache.stage_ms = 60_000
    loading = asyncio.create_task(node.load(A, 1))
    staging = asyncio.create_task(node.stage(B))
    await asyncio.sleep(0.5)
    began_ms = node.clock.monotonic_ms()
    await node.unload(A, 2)
    await node.unload(B, 2)
    assert node.clock.monotonic_ms() - began_ms <= 1_000
    assert isinstance(await outcome(loading), Conflict)
    assert isinstance(await outcome(staging), Conflict)
    assert node.state(A) is State.REGISTERED
    assert (node.node.disk.reserved, node.device) == (0, (0, 0))


@on_a_small_node(*MODELS)
async def test_a_caller_of_a_staging_that_leaves_stops_nothing(node: SmallNode) -> None:
    """As with loads."""
    node.cache.stage_ms = 1_000
    caller = asyncio.create_task(node.stage(A))
    await asyncio.sleep(0.5)
    caller.cancel()
    await asyncio.sleep(1)
    assert node.node.host.ledger.is_whole(A.digest)


@on_a_small_node(*MODELS)
async def test_the_estimate_is_near_what_it_then_takes(node: SmallNode) -> None:
    """A first load teaches the rates: at the start of the second, of equal size, the estimate is within a quarter."""
    node.cache.stage_ms, node.arena.fill_ms = 2_000, 1_000
    node.library.knobs = {model.name: {"load_ms": "1000"} for model in (A, B)}
    await node.load(A)
    began_ms = node.clock.monotonic_ms()
    steps = await node.load(B)
    took_ms = node.clock.monotonic_ms() - began_ms
    first = next(step for step in steps if step.state is State.STAGING and step.bytes_total)
    assert first.remaining_ms is not None
    assert abs(first.remaining_ms - took_ms) <= took_ms // 2
    assert steps[-1].remaining_ms == 0


@on_a_small_node(*MODELS, disk_bytes=340)
async def test_what_never_fits_the_disk_is_refused_at_once(node: SmallNode) -> None:
    """B22: 350 of 340: nothing is fetched, and what is there stays."""
    await node.stage(A, to_host=False)
    refusal = await outcome(node.load(TUNED[0]))
    assert isinstance(refusal, InvalidInput)
    assert refusal.code == NEVER_FITS
    assert node.cache.copies == [A.digest]
    assert set(node.cache.cached) == {A.digest}


@pytest.mark.parametrize(("next_one", "left"), [(A, 100), (B, 140), (TUNED[0], 350)])
def test_an_interrupted_file_stands_in_the_account_until_it_is_gone_on_with(next_one: Model, left: int) -> None:
    """40 of A's 100 bytes were left. A: they are part of its 100. B: 40 + 100. One of 350 of 380: they have to go."""

    async def work() -> None:
        async with small_node(MODELS, disk_bytes=380) as node:
            node.cache.interrupted = [Interrupted(A.files[0].sha256, 40, 0)]
            await node.caches.start()
            assert node.node.disk.resident == 40
            await node.stage(next_one, to_host=False)
            assert node.node.disk.resident == left
            assert bool(node.cache.interrupted) == (next_one is B or next_one is A)

    run_virtual(work())


def test_a_new_process_takes_over_both_tiers() -> None:
    """What is on disk and whole in the arena needs no byte to move; what does not fit the map is not believed."""

    async def work() -> None:
        async with small_node(MODELS) as old:
            await old.stage(A)
            await old.stage(B)
        async with small_node(MODELS, host_bytes=150) as new:
            new.cache.cached = dict(old.cache.cached)
            new.arena.recorded = old.arena.recorded
            await new.caches.start()
            assert set(new.node.disk.contents) == {A.digest, B.digest}
            assert new.node.host.ledger.resident == 100  # of two of 100 the second lies beyond 150
            await new.stage(A)
            assert (new.cache.copies, new.arena.filled) == ([], [])

    run_virtual(work())


@on_a_small_node(*MODELS, disk_bytes=250)
async def test_the_disk_refuses_what_only_used_ones_could_make_room_for(node: SmallNode) -> None:
    """Two are loaded; a pre-warm of a third is refused and nobody was deleted."""
    await node.load(A)
    await node.load(B)
    assert isinstance(await outcome(node.stage(C)), CapacityExhausted)
    assert set(node.cache.cached) == {A.digest, B.digest}


@pytest.mark.parametrize(
    ("reason", "priority"),
    [("demand", 0), ("operator", 0), ("", 0), ("reconcile", 0), ("prewarm", 1), ("background", 2)],
)
def test_the_reason_says_who_goes_first(reason: str, priority: int) -> None:
    """Callers that give no reason are taken for requests."""
    assert Priority.of_reason(reason) == priority


def test_versions_on_disk_without_files_are_an_empty_account() -> None:
    """A cached version of no bytes takes none: the account does not need special cases."""

    async def work() -> None:
        async with small_node((A,)) as node:
            digest = Digest("sha256:" + "e" * 64)
            node.cache.cached[digest] = CachedVersion(digest, node.arena.path, 0, 0)
            await node.caches.start()
            assert node.node.disk.resident == 0
            assert version_of(A) not in node.node.residences

    run_virtual(work())

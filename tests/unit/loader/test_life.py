"""The life of a model version, as tables: event by event, what it becomes and what is to be done."""

from dataclasses import replace

import pytest

from roundhouse.vocabulary import Digest, ModelName
from services.loader.domain import instance as words
from services.loader.domain.instance import BackingOff, Command, Event, Instance, Moved, Stale, State
from services.loader.domain.life import advance
from services.loader.domain.versions import ModelVersion, triton_model_name

VERSION = ModelVersion(ModelName("acme/chat"), Digest("sha256:" + "ab" * 32))
NOW = 1_000_000
FRESH = Instance(VERSION)

LOAD = words.LoadCommanded(1)
UNLOAD = words.UnloadCommanded(2)
TO_READY: tuple[Event, ...] = (LOAD, words.Admitted(), words.Staged(10), words.Loaded(20))


def run(*events: Event, start: Instance = FRESH) -> Moved:
    """Take events one after another; none may be refused."""
    moved = Moved(start)
    for event in events:
        step = advance(moved.instance, event, NOW)
        assert isinstance(step, Moved), step
        moved = step
    return moved


@pytest.mark.parametrize(
    ("events", "state", "command"),
    [
        (TO_READY[:1], State.ADMITTING, Command.ADMIT),
        (TO_READY[:2], State.STAGING, Command.STAGE),
        (TO_READY[:3], State.LOADING, Command.LOAD),
        (TO_READY, State.READY, None),
        ((*TO_READY, UNLOAD), State.DRAINING, Command.DRAIN),
        ((LOAD, words.NotAdmitted()), State.REGISTERED, None),
        ((*TO_READY[:2], words.StageFailed("gone")), State.FAILED, None),
        ((*TO_READY[:3], words.LoadFailed("bad")), State.UNLOADING, Command.UNLOAD),
        ((*TO_READY[:3], words.LoadFailed("bad"), words.Unloaded()), State.FAILED, None),
        ((*TO_READY, words.Lost()), State.STAGED, None),
        ((words.Adopted(),), State.READY, None),
        ((words.FoundLeaving(),), State.UNLOADING, Command.UNLOAD),
        ((words.FoundOnDisk(),), State.STAGED, None),
        ((words.FoundOnDisk(), words.DroppedFromDisk()), State.REGISTERED, None),
    ],
)
def test_the_way_in_and_what_may_go_wrong(events: tuple[Event, ...], state: State, command: Command | None) -> None:
    """Each step of the table ends in the state and command beside it."""
    moved = run(*events)
    assert (moved.instance.state, moved.command) == (state, command)


@pytest.mark.parametrize("done", range(1, 4))
def test_a_load_overtaken_by_an_unload_ends_not_ready(done: int) -> None:
    """B17: wherever the load was when the unload came, its next event ends at rest or in unloading."""
    moved = run(*TO_READY[:done], UNLOAD, TO_READY[done])
    if moved.command is Command.UNLOAD:
        moved = run(words.Unloaded(), start=moved.instance)
    assert moved.instance.state in (State.REGISTERED, State.STAGED)
    assert moved.command is None


def test_an_unload_overtaken_by_a_load_ends_ready() -> None:
    """B17: while draining it is ready again at once; while unloading it is loaded again as soon as it is gone."""
    draining = run(*TO_READY, UNLOAD).instance
    assert run(words.LoadCommanded(3), start=draining).instance.state is State.READY
    unloading = run(words.DrainElapsed(draining.steps), words.LoadCommanded(3), start=draining)
    assert (unloading.instance.state, unloading.command) == (State.UNLOADING, None)
    again = run(words.Unloaded(), start=unloading.instance)
    assert (again.instance.state, again.command) == (State.ADMITTING, Command.ADMIT)


def test_the_newest_generation_wins() -> None:
    """After generation 5 asked for a load, 4 is stale whatever it wants, and 5 is stale if it wants the opposite."""
    ready = run(words.LoadCommanded(5), *TO_READY[1:]).instance
    assert advance(ready, words.UnloadCommanded(4), NOW) == Stale(5)
    assert advance(ready, words.LoadCommanded(4), NOW) == Stale(5)
    assert advance(ready, words.UnloadCommanded(5), NOW) == Stale(5)
    assert advance(ready, words.LoadCommanded(5), NOW) == Moved(ready)


@pytest.mark.parametrize("done", range(1, 5))
def test_a_repeated_load_is_answered_not_repeated(done: int) -> None:
    """Invariant 7: no second command comes out of the same order."""
    before = run(*TO_READY[:done]).instance
    assert advance(before, LOAD, NOW) == Moved(before)


def test_a_failure_keeps_its_cause_and_its_pause() -> None:
    """B18: 1 s after the first failure, 2 s after the second; an operator need not wait; success forgets it."""
    failed = run(*TO_READY[:2], words.StageFailed("gone")).instance
    assert advance(failed, LOAD, NOW + 999) == BackingOff("gone", NOW + 1_000)
    forced = advance(failed, words.LoadCommanded(2, force=True), NOW)
    assert isinstance(forced, Moved)
    assert forced.command is Command.ADMIT
    again = advance(failed, LOAD, NOW + 1_000)
    assert isinstance(again, Moved)
    twice = run(words.Admitted(), words.StageFailed("still gone"), start=again.instance).instance
    assert (twice.reason, twice.retry_at_ms) == ("still gone", NOW + 2_000)
    mended = run(words.LoadCommanded(2, force=True), *TO_READY[1:], start=twice).instance
    assert (mended.reason, mended.failures, mended.retry_at_ms) == ("", 0, 0)


def test_an_unload_forgets_a_failure() -> None:
    """The next load does not wait."""
    failed = run(*TO_READY[:2], words.StageFailed("gone")).instance
    rested = run(UNLOAD, start=failed).instance
    assert (rested.state, rested.failures) == (State.REGISTERED, 0)
    assert run(words.LoadCommanded(3), start=rested).command is Command.ADMIT


def test_a_claimed_instance_drains_and_comes_back_if_it_is_not_needed() -> None:
    """B19, B22: whose bytes were promised is ready again when the other load failed before it had to leave."""
    ready = run(*TO_READY).instance
    claimed = run(words.Claimed(), start=ready).instance
    assert claimed.state is State.DRAINING
    assert run(words.Unclaimed(), start=claimed).instance.state is State.READY
    leaving = run(words.DrainElapsed(claimed.steps), start=claimed)
    assert (leaving.instance.state, leaving.command) == (State.UNLOADING, Command.UNLOAD)


def test_an_old_drain_does_not_end_a_new_one() -> None:
    """The timer of a drain that was called off says nothing about the next drain."""
    first = run(*TO_READY, UNLOAD).instance
    second = run(words.LoadCommanded(3), words.UnloadCommanded(4), start=first).instance
    assert run(words.DrainElapsed(first.steps), start=second).instance.state is State.DRAINING


@pytest.mark.parametrize(
    "late",
    [words.Admitted(), words.Staged(1), words.Loaded(1), words.LoadFailed("x"), words.Unloaded(), words.Unclaimed()],
)
def test_a_late_event_changes_nothing(late: Event) -> None:
    """Events of a step that is over are ignored."""
    ready = run(*TO_READY).instance
    assert advance(ready, late, NOW) == Moved(ready)


def test_the_name_in_triton_tells_versions_apart() -> None:
    """B19: a new digest is another name; names of models cannot run into each other."""
    assert triton_model_name(VERSION) == "acme=2Fchat--" + "ab" * 6
    assert triton_model_name(replace(VERSION, digest=Digest("sha256:" + "cd" * 32))) != triton_model_name(VERSION)

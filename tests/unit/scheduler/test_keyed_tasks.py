"""Background work of which there is at most one for each key."""

import asyncio

from structlog.testing import capture_logs

from services.scheduler.operations.keyed_tasks import KeyedTasks


async def turns() -> None:
    """Let the loop run what is ready: the work's end, then what follows from it."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_there_is_one_for_each_key_until_it_ends() -> None:
    """Begun twice, it runs once; another key does not wait; after its end it can be begun again."""
    tasks: KeyedTasks[str] = KeyedTasks("work")
    done, runs = asyncio.Event(), []

    async def work(key: str) -> None:
        runs.append(key)
        await done.wait()

    begun = [tasks.begin(key, lambda key=key: work(key)) for key in ("a", "a", "b")]  # type: ignore[misc]
    assert begun == [True, False, True]
    await asyncio.sleep(0)
    assert (runs, "a" in tasks) == (["a", "b"], True)
    done.set()
    await turns()
    assert tasks.begin("a", lambda: work("a"))
    await tasks.stop()


async def test_a_failure_is_told_and_leaves_the_key_free() -> None:
    """Nobody awaits the task, so its failure is in the log, without a traceback of its own."""
    tasks: KeyedTasks[str] = KeyedTasks("work")

    async def work() -> None:
        raise ValueError("seven")

    with capture_logs() as logs:
        tasks.begin("a", work)
        await turns()
    [told] = logs
    assert (told["event"], told["work"], told["text"]) == ("background_work_failed", "work", "seven")


async def test_stopping_also_ends_what_has_not_begun_to_run() -> None:
    """The first was begun a moment ago and has not run yet: it never does, and nothing is left un-awaited."""
    tasks: KeyedTasks[str] = KeyedTasks("work")
    ran = []

    async def work() -> None:
        ran.append(1)

    tasks.begin("a", work)
    await tasks.stop()
    assert (ran, "a" in tasks) == ([], False)

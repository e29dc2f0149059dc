"""A child outlives the thread that asked for it, and a program that is missing is told to whoever asked."""

import asyncio
import threading
from pathlib import Path

import pytest

from deploy.local.child import ChildProcess, Command


def started_by_a_thread(command: Command) -> ChildProcess:
    """Started by a thread that has ended when this returns."""
    found: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: found.append(ChildProcess.start(command)))
    thread.start()
    thread.join()
    return found[0]


def test_a_child_lives_on_when_the_thread_that_started_it_ends(tmp_path: Path) -> None:
    """The kernel would kill it with the thread that forked it. Twice, since the first may begin the lasting thread."""
    for number in range(2):
        child = started_by_a_thread(Command(["/bin/sleep", "0.3"], tmp_path / f"{number}.log"))
        assert asyncio.run(child.exited()) == 0


def test_a_missing_folder_is_told_to_whoever_asked(tmp_path: Path) -> None:
    """Also from a thread: the error is raised where `start` was called."""
    command = Command(["/bin/true"], tmp_path / "log", directory=tmp_path / "absent")
    told: list[BaseException] = []

    def ask() -> None:
        try:
            ChildProcess.start(command)
        except OSError as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert isinstance(told[0], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        ChildProcess.start(command)

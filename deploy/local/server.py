"""A server program with a readiness probe: start, wait until ready, stop, kill, restart on the same port and data.

What it does not do: watch for crashes. That is the supervisor's work (`deploy/local/supervisor.py`).
"""

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.local.child import ChildProcess, Command

PROBE_INTERVAL_S = 0.03
LOG_TAIL_LINES = 12

Probe = Callable[[], str | None]
"""Asks once, quickly: None = ready, else the reason it is not."""


class PartFailed(Exception):
    """A part ended or did not become ready; the text has the reason and the end of its log."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run and how to know that it serves."""

    name: str
    command: Command
    probe: Probe
    port: int  # the one to show: what clients dial
    ready_within_s: float = 20.0
    grace_s: float = 5.0  # between `stop_signal` and SIGKILL
    stop_signal: signal.Signals = signal.SIGTERM
    shared_memory_prefix: str = ""  # entries of /dev/shm to remove after its end; empty = none


class LocalServer:
    """One program and its current process."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.child: ChildProcess | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.child is not None and self.child.exit_code is None

    def spawn(self) -> ChildProcess:
        """Start the process, from the main thread, without waiting until it is ready."""
        remove_shared_memory(self.program.shared_memory_prefix)
        self.child = ChildProcess.start(self.program.command)
        return self.child

    def start(self) -> None:
        """Start it and wait until it is ready. Raises PartFailed and leaves nothing behind then."""
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def wait_ready(self) -> None:
        """Probe until ready. Raises PartFailed if the process ends or the time is over."""
        child = self.child
        assert child is not None, "spawn comes first"
        deadline = time.monotonic() + self.program.ready_within_s
        while (reason := self.program.probe()) is not None:
            if child.exit_code is not None:
                raise PartFailed(f"{self.program.name} ended with code {child.exit_code}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                limit = f"{self.program.ready_within_s:.0f} s"
                raise PartFailed(f"{self.program.name} is not ready after {limit}: {reason}\n{self.log_tail()}")
            time.sleep(PROBE_INTERVAL_S)

    def stop(self) -> None:
        """Let it drain, then make sure that it is gone with its shared memory. Idempotent."""
        if self.child is not None:
            self.child.stop(self.program.grace_s, self.program.stop_signal)
        remove_shared_memory(self.program.shared_memory_prefix)

    def kill(self) -> None:
        """SIGKILL, as in a crash, except that its shared memory is removed. Idempotent."""
        if self.child is not None:
            self.child.kill()
        remove_shared_memory(self.program.shared_memory_prefix)

    def restart(self) -> None:
        """Stop it if it runs and start it again on the same port and data. Raises PartFailed."""
        self.stop()
        self.start()

    def log_tail(self) -> str:
        """The last lines of its log."""
        return log_tail(self.program.command.log)


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log file; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def remove_shared_memory(prefix: str) -> list[str]:
    """Remove the POSIX shared memory whose name starts with `prefix`; returns the names. Empty prefix: nothing."""
    removed: list[str] = []
    if prefix:
        for entry in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108 - where Linux keeps POSIX shared memory
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
            removed.append(entry.name)
    return removed

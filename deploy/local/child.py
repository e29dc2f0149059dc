"""One child process: started in its own process group, tied to its parent's life, and stopped without a rest.

Invariant: after `stop` or `kill` returns, no process of the group is alive. The kernel ties a child to the thread that
forked it, so that is always one that lives as long as this process.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from roundhouse.environment import child_environment

TETHER = Path(__file__).with_name("tether.py")
Spawn = Callable[[], "subprocess.Popen[bytes]"]

GROUP_GONE_S = 5.0  # after SIGKILL; a process stuck longer is in the kernel, which no signal helps
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: argv[0] is an absolute path; `environment` is added to the inherited one."""

    argv: Sequence[str]
    log: Path  # stdout and stderr are appended here
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    user: str | None = None  # run as this user; needs root


def process_start_ticks(pid: int) -> int | None:
    """When the kernel started `pid`, in clock ticks since boot; None if there is no such process (or only a zombie).

    With the pid it names a process for good: pids are used again, pairs are not."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


class ChildProcess:
    """A running child. Use `ChildProcess.start`."""

    def __init__(self, process: "subprocess.Popen[bytes]", command: Command) -> None:
        self._process = process
        self.command = command
        self.start_ticks = process_start_ticks(process.pid) or 0
        self.started_monotonic = time.monotonic()

    @classmethod
    def start(cls, command: Command) -> "ChildProcess":
        """Start it. Raises OSError if the program or the directory is missing."""
        command.log.parent.mkdir(parents=True, exist_ok=True)
        tethered = [sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), command.user or "", *command.argv]
        with command.log.open("ab") as log:
            process = _by_lasting_thread(
                lambda: subprocess.Popen(
                    tethered,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=child_environment(command.environment),
                    cwd=command.directory,
                    start_new_session=True,
                )
            )
        return cls(process, command)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    async def exited(self) -> int:
        """Wait for its end and return the exit code. Cancelling stops only the waiting."""
        if self.exit_code is None:
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            handle = os.pidfd_open(self.pid)
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self._process.wait()

    def stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> int:
        """Send `number`, wait up to `grace_s`, then SIGKILL to the whole group. Idempotent; returns the exit code."""
        if self.exit_code is None:
            self._process.send_signal(number)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self.kill()

    def kill(self) -> int:
        """SIGKILL to the whole group; returns when it is gone. Idempotent."""
        deadline = time.monotonic() + GROUP_GONE_S
        while self._signal_group(signal.SIGKILL) and group_members(self.pid) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(POLL_S)
        return self._process.wait(GROUP_GONE_S)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, as SIGSTOP and SIGCONT in fault tests."""
        self._signal_group(number)

    def _signal_group(self, number: signal.Signals) -> bool:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # the group is gone, or only zombies are left of it
            return False
        return True


def _by_lasting_thread(spawn: Spawn) -> "subprocess.Popen[bytes]":
    if threading.current_thread() is threading.main_thread():
        return spawn()
    started: Future[subprocess.Popen[bytes]] = Future()
    _spawner().put((spawn, started))
    return started.result()


@cache
def _spawner() -> "SimpleQueue[tuple[Spawn, Future[subprocess.Popen[bytes]]]]":
    """What a thread of its own, which ends with this process, starts for the others."""
    wanted: SimpleQueue[tuple[Spawn, Future[subprocess.Popen[bytes]]]] = SimpleQueue()

    def serve() -> None:
        while True:
            spawn, started = wanted.get()
            try:
                started.set_result(spawn())
            except OSError as error:
                started.set_exception(error)

    threading.Thread(target=serve, name="spawner", daemon=True).start()
    return wanted


def group_members(group: int) -> list[int]:
    """Pids of the processes of a group that are no zombies. O(processes of the machine), about 2 ms."""
    members: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and process_start_ticks(int(name)) is not None:
            with suppress(ProcessLookupError):
                if os.getpgid(int(name)) == group:
                    members.append(int(name))
    return members

"""The machine's processes as /proc lists them at one moment: who started whom, and what memory each has of its own."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
_KIB = 1024
_ENDED = (b"Z", b"X")


@dataclass(frozen=True, slots=True)
class Process:
    """One running process."""

    pid: int
    parent: int
    group: int  # id of its process group: that of the process that began it
    command: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """A snapshot. What ended meanwhile is missing or reads as nothing."""

    processes: dict[int, Process] = field(default_factory=dict)

    @classmethod
    def read(cls, proc: Path = PROC) -> "ProcessTable":
        """Look now. O(processes of the machine)."""
        found = {}
        for folder in proc.iterdir():
            if folder.name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    process = _read(folder)
                    if process is not None:
                        found[process.pid] = process
        return cls(found)

    def family(self, pids: Iterable[int]) -> set[int]:
        """These and their descendants, as far as they run."""
        members = {pid for pid in pids if pid in self.processes}
        while more := {each.pid for each in self.processes.values() if each.parent in members} - members:
            members |= more
        return members

    def group(self, pid: int) -> set[int]:
        """Everyone in the group that a process leads, also whose own parents have ended; nobody if it leads none."""
        return {each.pid for each in self.processes.values() if each.group == pid}


def runs(pid: int, proc: Path = PROC) -> bool:
    """Whether it still has memory: what waits for its parent to take notice has none."""
    try:
        return _words(proc / str(pid))[0] not in _ENDED
    except (OSError, IndexError):
        return False


def own_bytes(pid: int, proc: Path = PROC) -> int:
    """Anonymous memory, by its share: neither libraries nor what is mapped from the arena. 0 if it cannot be told."""
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss_Anon:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * _KIB if found else 0


def _read(folder: Path) -> Process | None:
    command = tuple((folder / "cmdline").read_bytes().split(b"\0"))
    if not command[0]:
        return None  # of the kernel, or ended
    _, parent, group, *_ = _words(folder)
    return Process(int(folder.name), int(parent), int(group), command)


def _words(folder: Path) -> list[bytes]:
    """State, parent, group … of `pid (name) state parent group …`; the name may hold anything, also parentheses."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()

"""What a cluster that died without goodbye may leave, and its removal: children, shared memory, half-written files."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from shutil import rmtree

from deploy.local.child import group_members, process_start_ticks
from deploy.local.home import ClusterState, Home
from deploy.local.server import remove_shared_memory


def remove_leftovers(home: Home) -> list[str]:
    """Clean up after a dead cluster; the caller holds the lock. Returns what was done, for people. Idempotent."""
    done: list[str] = []
    state = home.read_state()
    if state is not None:
        for name, pid in living_parts(state):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            done.append(f"ended {name} (pid {pid}) of an earlier run")
    elif home.state_file.exists():
        done.append("dropped an unreadable run/state.json")
    home.state_file.unlink(missing_ok=True)
    removed = remove_shared_memory(home.shared_memory_prefix)
    if removed:
        done.append(f"removed {len(removed)} shared-memory segments of an earlier run")
    for partial in [*home.data.glob("*.partial"), *home.root.glob(".*.partial")]:
        rmtree(partial) if partial.is_dir() else partial.unlink()
        done.append(f"removed the half-written {partial.name}")
    return done


def living_parts(state: ClusterState) -> Iterator[tuple[str, int]]:
    """Name and pid of recorded parts of which any process still runs.

    A part's pid is also its process group. The group counts as ours only if its leader is that very process, or if the
    leader is gone: the kernel does not give a pid to a new process while a group of that number exists."""
    for part in state.parts:
        ticks = process_start_ticks(part.pid)
        if ticks == part.start_ticks or (ticks is None and group_members(part.pid)):
            yield part.name, part.pid

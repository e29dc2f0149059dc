"""Stopping an embedded cluster from another process."""

import os
import select
import signal
from contextlib import suppress

from deploy.local.child import process_start_ticks
from deploy.local.home import AlreadyRunning, ClusterProblem, ClusterState, Home
from deploy.local.leftovers import remove_leftovers

DRAIN_LIMIT_S = 60.0  # drain of every tier, and then some
KILL_LIMIT_S = 10.0


def end_cluster(home: Home) -> str:
    """Stop the cluster of this folder and return what was done. Raises ClusterProblem if it will not end."""
    if not home.root.exists():
        return f"nothing runs: there is no {home.root}"
    state = home.read_state()
    was_running = home.is_locked()
    if was_running:
        _end_process(home, state)
    try:
        with home.locked():
            cleaned = remove_leftovers(home)
    except AlreadyRunning as problem:
        raise ClusterProblem(f"the cluster did not end: {problem}") from problem
    first = "stopped" if was_running else "nothing was running"
    return "; ".join([first, *cleaned])


def _end_process(home: Home, state: ClusterState | None) -> None:
    """SIGTERM to the cluster's own process, SIGKILL if it does not drain in time: its children die with it."""
    if state is None or process_start_ticks(state.pid) != state.start_ticks:
        raise ClusterProblem(
            f"another process holds {home.root} and {home.state_file} does not say which (it may be starting up);"
            " try again in a moment"
        )
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(state.pid)
        try:
            for number, limit_s in ((signal.SIGTERM, DRAIN_LIMIT_S), (signal.SIGKILL, KILL_LIMIT_S)):
                signal.pidfd_send_signal(handle, number)
                if select.select([handle], [], [], limit_s)[0]:
                    return
        finally:
            os.close(handle)

"""CPU time and memory of running processes, from /proc: the figure that other load on the machine disturbs least."""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds_by_group(groups: Mapping[str, int]) -> dict[str, float]:
    """Name → user + system seconds that the processes now in its group have used, ended children included."""
    used = dict.fromkeys(groups, 0.0)
    names = {group: name for name, group in groups.items()}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        name = names.get(int(fields[2]))
        if name is not None:
            used[name] += sum(int(fields[position]) for position in (11, 12, 13, 14)) / _TICKS_PER_SECOND
    return used


async def until_at_rest(groups: Mapping[str, int], share: float = 0.3, limit_s: float = 10.0) -> None:
    """Wait until a fifth of a second cost the groups less than `share` of a core; no longer than `limit_s`.

    What a request leaves to be done (its bill, its finish) has no end that a client could hear of. The share is above
    the heartbeats of an idle mesh and far below any load."""
    ends = time.monotonic() + limit_s
    before, at = sum(cpu_seconds_by_group(groups).values()), time.monotonic()
    while at < ends:
        await asyncio.sleep(0.2)  # what is looked at
        now, now_at = sum(cpu_seconds_by_group(groups).values()), time.monotonic()
        if now - before < share * (now_at - at):
            return
        before, at = now, now_at


def resident_bytes(groups: Mapping[str, int]) -> dict[str, int]:
    """Name → resident bytes of the processes now in its group."""
    used = dict.fromkeys(groups, 0)
    names = {group: name for name, group in groups.items()}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            pages = int((folder / "statm").read_text().split()[1])
        except OSError:  # it ended meanwhile
            continue
        if group in names:
            used[names[group]] += pages * os.sysconf("SC_PAGE_SIZE")
    return used

"""CPU time and memory of running processes, from /proc: the figure that other load on the machine disturbs least."""

import os
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

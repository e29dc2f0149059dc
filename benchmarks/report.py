"""What a benchmark says: figures, the limits they are measured against, and whether its goals are met.

A figure alone says little on an unknown machine, so each benchmark also measures the limit in the same run (the same
path without our part in it) and states goals as shares of that limit. This module prints and writes; it measures
nothing.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

Figure = float | int | str


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise and what was measured."""

    what: str
    goal: str  # as read by people, such as ">= 0.6"
    got: Figure
    met: bool

    @staticmethod
    def at_least(what: str, least: float, got: float) -> "Goal":
        """Met if `got >= least`."""
        return Goal(what, f">= {least:g}", round(got, 4), got >= least)

    @staticmethod
    def at_most(what: str, most: float, got: float) -> "Goal":
        """Met if `got <= most`."""
        return Goal(what, f"<= {most:g}", round(got, 4), got <= most)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run. Names carry their units last, as in `events_per_second`."""

    name: str
    figures: Mapping[str, Figure]
    limits: Mapping[str, Figure] = field(default_factory=dict)
    goals: Sequence[Goal] = ()

    @property
    def met(self) -> bool:
        """Whether every goal is met; true without goals."""
        return all(goal.met for goal in self.goals)

    def as_json(self) -> str:
        """The report with the machine it ran on, as indented JSON that ends in a newline."""
        document = {
            "name": self.name,
            "figures": dict(self.figures),
            "limits": dict(self.limits),
            "goals": [asdict(goal) for goal in self.goals],
            "machine": machine(),
        }
        return json.dumps(document, indent=2) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Print figures, limits and goals as tables."""
    table = Table("what", "value", title=report.name, title_justify="left")
    table.columns[1].justify = "right"
    for name, value in report.figures.items():
        table.add_row(name, _text(value))
    if report.limits:
        table.add_section()
    for name, value in report.limits.items():
        table.add_row(f"limit: {name}", _text(value))
    console.print(table)
    if report.goals:
        goals = Table("goal", "wanted", "got", "met")
        for goal in report.goals:
            goals.add_row(goal.what, goal.goal, _text(goal.got), "yes" if goal.met else "NO")
        console.print(goals)


def machine() -> dict[str, Figure]:
    """Where a run happened: without it its figures mean nothing."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _text(value: Figure) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    here = Path(__file__).parent
    answer = subprocess.run([git, "describe", "--always", "--dirty"], cwd=here, capture_output=True, check=False)
    return answer.stdout.decode().strip()

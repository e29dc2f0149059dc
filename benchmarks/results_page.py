"""`docs/benchmarks.md`: what the committed runs showed, goals missed as well as met.

`python -m benchmarks.results_page` writes it from `benchmarks/results`; a run whose `--json` goes there does so, too.
Nothing is measured or judged here: a goal is met if the run said so.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

OPENING = """\
# Benchmarks

Written by `python -m benchmarks.results_page` from the runs in `benchmarks/results`; not by hand.

`python -m benchmarks` lists all, `python -m benchmarks NAME [--json FILE]` runs one. Each measures its limit or a peer
in the same run, and goals are shares of that: absolute times of a small shared machine say little. Goals were set
before the work; they are shown as they came out. The figures of a run, its limits and its machine are in its file.
"""


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The committed reports by the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    return "\n".join([OPENING, *_summary(results), "", *_all_goals(results)]).rstrip("\n") + "\n"


def _summary(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "| run | goals met | commit | cores |"
    yield "| --- | --- | --- | --- |"
    for name, report in results.items():
        goals, machine = report["goals"], report["machine"]
        met = f"{sum(goal['met'] for goal in goals)} of {len(goals)}" if goals else "none set"
        yield f"| [{name}](#{name}) | {met} | {machine['commit']} | {machine['cores']} |"


def _all_goals(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, report in results.items():
        yield f"## {name}"
        yield ""
        yield f"[Figures](../benchmarks/results/{name}.json) of `python -m benchmarks {report['name']}`"
        yield ""
        if report["goals"]:
            yield "| goal | wanted | got | |"
            yield "| --- | --- | --- | --- |"
            yield from map(_row, report["goals"])
            yield ""


def _row(goal: Mapping[str, Any]) -> str:
    got = goal["got"] if isinstance(goal["got"], str) else f"{goal['got']:,.4g}"
    met = "met" if goal["met"] else "**missed**"
    return f"| {goal['what'].replace('_', ' ')} | {goal['goal']} | {got} | {met} |"


def write_page() -> None:
    """Bring the page up to date with the committed runs."""
    PAGE.write_text(render(read_results()))


if __name__ == "__main__":
    write_page()

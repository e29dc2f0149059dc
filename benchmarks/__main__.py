"""`python -m benchmarks NAME [--json FILE] [--strict] [options of the benchmark]`; without NAME it lists them.

A benchmark is a module of this package with `NAME`, `DESCRIPTION` and `run(arguments) -> Report`, where `arguments` is
what the harness did not take for itself. Adding one is adding its file; there is no list to keep.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from rich.console import Console

import benchmarks
from benchmarks.report import Report, print_report
from benchmarks.results_page import RESULTS, write_page

EXIT_GOAL_MISSED = 1


class Benchmark(Protocol):
    """What a benchmark module offers."""

    NAME: str
    DESCRIPTION: str

    def run(self, arguments: Sequence[str]) -> Report:
        """Measure; `arguments` are the benchmark's own options."""
        ...


def find(name: str) -> Benchmark | None:
    """The benchmark called `name`; None if there is none. Imports only that module."""
    module_name = name.replace("-", "_")
    if module_name not in {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}:
        return None
    module = importlib.import_module(f"benchmarks.{module_name}")
    return cast("Benchmark", module) if hasattr(module, "NAME") else None


def all_benchmarks() -> list[Benchmark]:
    """Every benchmark, by name."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    return [found for found in map(find, sorted(names)) if found is not None]


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark or list all; the exit status. 1 = a goal was missed under --strict."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="which one; without it, list them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a goal is missed")
    options, rest = parser.parse_known_args(arguments)
    console = Console()
    if options.name is None:
        for benchmark in all_benchmarks():
            console.print(f"{benchmark.NAME:20} {benchmark.DESCRIPTION}", highlight=False)
        return 0
    chosen = find(options.name)
    if chosen is None:
        parser.error(f"no benchmark is called {options.name!r}; without a name, all are listed")
    report = chosen.run(rest)
    print_report(report, console)
    if options.json is not None:
        options.json.write_text(report.as_json())
        if options.json.absolute().parent == RESULTS:
            write_page()
    return EXIT_GOAL_MISSED if options.strict and not report.met else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The tree keeps the shape that ARCHITECTURE.md describes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "scheduler", "loader", "kvstore", "metering")
CODE = ("roundhouse", "services", "engines", "deploy", "benchmarks")
LINES_MAX = 400
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "stuff"}
CASES_HELD = (
    *(
        "B01",
        "B02",
        "B03",
        "B04",
        "B05",
        "B06",
        "B07",
        "B09",
        "B10",
        "B12",
        "B13",
        "B14",
        "B17",
        "B18",
        "B19",
        "B22",
        "B24",
    ),
    *("B25", "B26", "B29", "B31", "B32", "B35", "B36", "B37", "B38", "B41", "B43", "B44", "B45", "B46", "B48"),
)


def python_files(*folders: str) -> list[Path]:
    """Hand-written Python files below the folders."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if "wire" not in path.relative_to(ROOT).parts]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_same_rooms(service: str) -> None:
    """Who knows one service finds the way in all of them."""
    rooms = {path.name for path in (ROOT / "services" / service).iterdir()}
    assert {"__main__.py", "app.py", "settings.py", "ports.py", "domain", "operations", "adapters"} <= rooms


def test_no_file_is_longer_than_the_limit() -> None:
    """A long file hides more than one room."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files(*CODE, "tests")}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX} == {}


def test_no_file_has_a_name_that_says_nothing() -> None:
    """A thing is found by its name."""
    assert [path for path in python_files(*CODE) if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES] == []


def test_every_module_says_why_it_exists() -> None:
    """Each non-empty module of the product begins with a docstring."""
    missing = [
        str(path.relative_to(ROOT))
        for path in python_files(*CODE)
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert missing == []


def test_only_one_room_reads_the_environment() -> None:
    """`os.environ` and `os.getenv` are read in `roundhouse/environment.py`; starting a child process may copy it."""
    readers = [
        str(path.relative_to(ROOT))
        for path in python_files("roundhouse", "services")
        if re.search(r"os\.(environ|getenv)\b", path.read_text())
    ]
    assert readers == ["roundhouse/environment.py"]


@pytest.mark.parametrize("case", CASES_HELD)
def test_case_is_named_by_a_test(case: str) -> None:
    """A failure that others had is held by a test whose docstring names it."""
    holders = [path for path in python_files("tests") if path != Path(__file__) and case in path.read_text()]
    assert holders, f"no test names {case}"


@pytest.mark.parametrize("number", range(1, 19))
def test_invariant_is_named_by_a_test(number: int) -> None:
    """Each invariant of ARCHITECTURE.md is checked somewhere under its number."""
    pattern = re.compile(rf"[Ii]nvariants?\b[^.\n]*\b{number}\b")
    holders = [path for path in python_files("tests") if path != Path(__file__) and pattern.search(path.read_text())]
    assert holders, f"no test names invariant {number}"


def test_the_lock_holds_no_index_address() -> None:
    """Packages come from whatever index the machine is set up for."""
    lock = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", lock)


def test_what_the_compatibility_page_promises_is_a_test() -> None:
    """Every row of the table of clients names tests that are there."""
    text = (ROOT / "docs" / "tenants" / "compatibility.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `") or "`tests/" in line]
    assert len([row for row in rows if "`tests/" in row]) >= 8
    for row in rows:
        names = re.findall(r"`((?:tests/[\w/]+/)?test_[\w*]+\.py)`", row)
        folders = {name.rpartition("/")[0] for name in names if "/" in name}
        for name in names:
            wanted = [name] if "/" in name else [f"{folder}/{name}" for folder in folders]
            assert any(list(ROOT.glob(each)) for each in wanted), f"{name} is not there"

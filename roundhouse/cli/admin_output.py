"""How operators' commands print: tables for people, JSON or YAML for programs, refusals on stderr with exit code 1."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roundhouse.cli.admin_client import EXIT_REFUSED, Refused

PIPED_WIDTH = 240  # no terminal to fit: rows must not be folded
_NOT_FOR_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")  # YAML 1.1, 5.1 and 5.4


class Format(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, typer.Option("--output", "-o", help="How to print.")]


@contextmanager
def refusals_told() -> Iterator[None]:
    """Turn a refusal into its text on stderr and exit code 1."""
    try:
        yield
    except Refused as refused:
        tell(f"Error: {refused}")
        raise typer.Exit(EXIT_REFUSED) from None


def tell(text: str) -> None:
    """Something for the person who watches, not for the program that reads."""
    typer.echo(text, err=True)


def show_data(data: object, output: Format) -> None:
    """Print plain data as JSON or YAML."""
    typer.echo(as_yaml(data) if output is Format.YAML else as_json(data), nl=False)


def as_json(data: object) -> str:
    """Plain data as JSON that is YAML too: what YAML would refuse or take for the end of a line is escaped."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return _NOT_FOR_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_yaml(data: object) -> str:
    """Plain data as YAML, readable in any language."""
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    # PyYAML escapes all but ASCII, or else folds the line ends of Unicode inside quotes, and so loses them.
    return yaml.safe_dump(data, sort_keys=False) if _NOT_FOR_YAML.search(text) else text


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, totals: int = 0) -> None:
    """Print rows; the last `totals` of them stand apart. Columns that hold only numbers are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) or row[index] == "" for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for number, row in enumerate(rows):
        if totals and number == len(rows) - totals:
            table.add_section()
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    console.print(table)


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: Format) -> None:
    """Print things of one kind: chosen columns as a table, or everything as data."""
    if output is Format.TABLE:
        show_table(columns, [[row.get(column) for column in columns] for row in rows])
    else:
        show_data(rows, output)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(_cell(item) for item in value) or "-"
        case dict():
            return ", ".join(f"{key}={_cell(item)}" for key, item in value.items() if item is not None) or "-"
    return str(value)

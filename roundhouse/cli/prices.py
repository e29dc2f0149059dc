"""`roundhouse prices`: versions of prices, and rating recorded usage again. See docs/operators/metering.md."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from roundhouse.cli.admin_client import AdminKey, AdminUrl, Refused, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table, tell

COLUMNS = ("id", "model", "adapter", "class", "currency", "input", "cached_input", "output", "from", "to", "origin")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Versions of prices.")


@app.command()
def apply(
    file: Annotated[Path, typer.Option("--file", "-f", exists=True, dir_okay=False, help="YAML: a list `prices`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be added.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Add new versions of prices. What is there already is left alone; nothing is ever changed."""
    with refusals_told():
        answer = open_api(admin_url, admin_key).post("/metering/prices", prices=_prices_in(file), dry_run=dry_run)
        _show(answer["added"], output)
        tell(f"{len(answer['added'])} {'would be' if dry_run else ''} added".replace("  ", " "))


@app.command(name="list")
def list_prices(
    model: Annotated[str, typer.Option("--model", help="Only prices of this model.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Every version of every price, and since when it holds."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get("/metering/prices")["prices"]
        _show([price for price in found if model in ("", price["model"])], output)


@app.command()
def rerate(
    since: Annotated[str, typer.Option("--from", help="Usage from this date or time on.")] = "",
    until: Annotated[str, typer.Option("--to", help="Usage before this date or time.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be corrected.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Rate recorded usage again by the prices of its own time. Corrections are added; run again, nothing is left."""
    with refusals_told():
        body = {"from": since, "to": until, "dry_run": dry_run}
        answer = open_api(admin_url, admin_key).post("/metering/prices/rerate", **body)
        if output is not Format.TABLE:
            show_data(answer, output)
            return
        show_table(
            ("old price", "new price", "rows"),
            [[_named(m["from"]), _named(m["to"]), m["rows"]] for m in answer["moves"]],
        )
        for currency, amount in answer["difference"].items():
            typer.echo(f"difference: {amount} {currency}")
        done = "would be corrected" if dry_run else "corrected"
        tell(f"{answer['examined']} rows looked at, {answer['corrected']} {done}")


def _prices_in(file: Path) -> list[dict[str, Any]]:
    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"{file} is not YAML: {error}") from error
    found = document.get("prices") if isinstance(document, dict) else document
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise Refused(f"{file} must hold a list `prices`")
    # Amounts and instants go as text: a float would not be exact, and JSON has no dates.
    return [{str(name): _text(value) for name, value in item.items()} for item in found]


def _text(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _show(found: list[dict[str, Any]], output: Output) -> None:
    if output is not Format.TABLE:
        show_data(found, output)
        return
    show_table(COLUMNS, [[price[column] or "-" for column in COLUMNS] for price in found])


def _named(price_id: str) -> str:
    return price_id or "(none)"
